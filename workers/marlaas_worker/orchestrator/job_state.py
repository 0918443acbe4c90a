"""The state of one job and every decision about it, without I/O.

The state is what `apply` makes of the job's events (the entries of its log, and its records), and of the episodes since then. So a
restart after a crash and the original run reach the same state. Functions here return a decision as an event, and do not change the
state; `owned_job` logs the event, and then applies it.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from marlaas_api.messages import (
    DataPosition,
    Episode,
    EvalRecord,
    EvaluationBegun,
    GroupDecided,
    IssueLedger,
    JobDocument,
    JobLogEntry,
    PolicyRecord,
    StepClosed,
    StepRecord,
    TasksIssued,
    UsageAmounts,
)
from marlaas_api.messages.usage import merged
from marlaas_api.names import Split, eval_group, eval_index, train_group
from marlaas_worker.orchestrator.diagnosis import FaultWatch
from marlaas_worker.orchestrator.episodes import slim
from marlaas_worker.orchestrator.evaluation import EvaluationRun, EvaluationSchedule, without_samples
from marlaas_worker.orchestrator.experience import Experience, count_faults, group_index
from marlaas_worker.orchestrator.job_tasks import JobTasks, PastDraw, Walk
from marlaas_worker.orchestrator.open_groups import OpenGroups
from marlaas_worker.orchestrator.steps import Assembly, StepRules

MAX_PROMPTS = 50_000
"""Most digests of trained tasks that are kept for a job, about 5 MiB: all jobs share the orchestrator's memory."""


TRAINING_FAULTS = {"out-of-memory": "out_of_memory", "non-finite": "skipped_update"}
"""By class of `Progress.training_faults`, the step metric in which the trainer counts these faults."""


Event = JobLogEntry | StepRecord | EvalRecord
"""A stored fact about a job: an entry of its log, or the record of a step or an evaluation."""


@dataclass(frozen=True, slots=True)
class JobHistory:
    """The records of a job in streams and buckets, read when the orchestrator takes up the job.

    Attributes:
        steps: recorded steps, oldest first.
        evaluations: recorded evaluations.
        log: entries of the job's log (stream GROUPS), in its order.
        policies: policy records, by agent; version -1 while an agent has none.
    """

    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[EvalRecord, ...] = ()
    log: tuple[JobLogEntry, ...] = ()
    policies: Mapping[str, PolicyRecord] = field(default_factory=dict)


@dataclass(slots=True)
class RecordedTotals:
    """Totals over recorded steps and evaluations.

    Attributes:
        faults: number of faults of episodes, by class.
        skips: number of skipped visits, by difficulty: `solved`, `hopeless`.
        training_faults: number of faults of training, by class as in TRAINING_FAULTS.
        trainer_s: seconds that trainers computed.
        usage: by agent, the usage of the recorded episodes.
        untrained: by agent and cause, the number of steps without a new version of the agent. A step counts for one cause: the most frequent
            one among the agent's groups in it (`UntrainedCause`).
    """

    faults: Counter[str] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)
    training_faults: Counter[str] = field(default_factory=Counter)
    trainer_s: float = 0.0
    usage: dict[str, UsageAmounts] = field(default_factory=dict)
    untrained: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add_step(self, record: StepRecord) -> None:
        """Add a recorded step."""
        self.faults.update(record.faults)
        self.skips.update(solved=record.skipped_solved, hopeless=record.skipped_hopeless)
        self.training_faults += Counter({name: int(record.metric(metric)) for name, metric in TRAINING_FAULTS.items()})
        self.trainer_s += record.metric("train_s")
        self.usage = merged(self.usage, record.usage)
        for agent, part in record.agents.items():
            if part.untrained:
                self.untrained[agent][max(part.untrained, key=part.untrained.__getitem__)] += 1

    def add_evaluation(self, record: EvalRecord) -> None:
        """Add a recorded evaluation."""
        self.faults.update(record.faults)
        self.usage = merged(self.usage, record.usage)


class JobState:
    """State of one job from its records and episodes, with the functions that decide on its next events. No I/O.

    Attributes:
        document: the job's document.
        policies: policy records by agent, in the order of the manifest; version -1 while an agent has none.
        evaluations: recorded evaluations by version, without their samples and metrics.
        finished: number of recorded steps.
        last_step: the record of the last step; None before the first.
        evaluation: the evaluation in progress; None if there is none.
        tasks: the order of the training tasks, and the past versions that play in them.
        recorded: totals over the recorded steps and evaluations.
        faults: decides whether the job fails because of faults.
        assembly: the steps that are not recorded yet.
        groups: the groups that are issued and whose step is not recorded yet.
        episode_bytes: estimate of the bytes that an episode adds to the stream TURNS; 0 before the first measurement.
        trained_prompts: digests of the tasks of recorded steps, MAX_PROMPTS at most. Beyond that, an evaluation's overlap with them is a lower bound.
    """

    def __init__(self, document: JobDocument, history: JobHistory) -> None:
        spec = document.spec
        self.document = document
        unknown = PolicyRecord(uid=document.uid)
        self.policies = {agent.name: history.policies.get(agent.name, unknown) for agent in spec.policies}
        self.evaluations: dict[int, EvalRecord] = {}
        self.finished = 0
        self.last_step: StepRecord | None = None
        self.evaluation: EvaluationRun | None = None
        self.tasks = JobTasks(document)
        self.episode_bytes = 0
        self.recorded = RecordedTotals()
        self.trained_prompts: set[str] = set()
        self._experience = Experience(
            spec.agents,
            spec.rollout.group_size,
            needs_no_others=spec.training.needs_no_others,
            credit=spec.training.credit,
            demonstrates=spec.demonstrates,
        )
        group, num_groups = spec.group_size, spec.training.groups_per_step
        # Of groups of one, a whole step: the first fault must not fail the job.
        at_least = group if group > 1 else num_groups
        window, has_scored = max(2 * group, group * num_groups), bool(history.steps or history.evaluations)
        self.faults = FaultWatch(window, spec.environment.max_fault_share, at_least, has_scored=has_scored)
        training = spec.training
        sampled = (training.groups_per_step, training.max_staleness, training.max_refill)
        rules = StepRules(*sampled, training.steps, spec.demonstrated_steps, spec.rows_per_step)
        first = {agent: record.version if record.step < 0 else 0 for agent, record in self.policies.items()}
        self.assembly = Assembly(document.ref, rules, first)
        self.groups = OpenGroups()
        self._schedule = EvaluationSchedule(self.policies, strict=self.strict)
        for event in (*history.steps, *history.evaluations, *history.log):
            self.apply(event)
        # The log still names them until it is compacted.
        self.groups.recorded({index for record in history.steps for index in record.indices})

    def apply(self, event: Event) -> None:
        """Change the state by a stored fact. A decision about a recorded step, or the start of a recorded evaluation, changes nothing."""
        match event:
            case StepRecord():
                self._apply_step(event)
            case EvalRecord():
                self._apply_evaluation(event)
            case IssueLedger():
                self._move_to(event)
                self.groups.restore(dict.fromkeys(event.open, 1) | dict(zip(event.open, event.open_from, strict=False)))
                version, numbers = event.evaluating, (event.evaluating_step, event.evaluating_from)
                self.evaluation = None
                if version is not None:
                    self._begin_evaluation(version, *numbers, event.evaluating_versions)
            case TasksIssued():
                self._move_to(event)
                self.groups.issue(event.indices, event.turns_from)
            case EvaluationBegun():
                self._begin_evaluation(event.version, event.step, event.turns_from, event.versions)
            case GroupDecided() | StepClosed() if not self.assembly.is_recorded(event.step):
                self.assembly.apply(event)
                if isinstance(event, GroupDecided):
                    self.groups.decide(event.index)
                    self.tasks.add_outcomes(self.tasks.outcome(event.index, event.parts))

    @property
    def strict(self) -> bool:
        """Whether training is strictly on-policy: maxStaleness is 0."""
        return self.document.spec.training.max_staleness == 0

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the agents that are trained."""
        return tuple(agent.name for agent in self.document.spec.agents if agent.trainable)

    @property
    def versions(self) -> dict[str, int]:
        """Committed version by agent; -1 before the first."""
        return {agent: record.version for agent, record in self.policies.items()}

    @property
    def committed(self) -> dict[str, int]:
        """By agent, the last step that its trainer has finished; -1 before the first."""
        return {agent: record.step for agent, record in self.policies.items()}

    @property
    def has_policies(self) -> bool:
        """Whether every agent has a committed version."""
        return all(record.version >= 0 for record in self.policies.values())

    @property
    def version(self) -> int:
        """Sum of the agents' versions, or -1 while an agent has none; it grows with every commit of any agent."""
        return sum(self.versions.values()) if self.has_policies else -1

    @property
    def training_over(self) -> bool:
        """Whether every step is on record."""
        return self.finished >= self.document.spec.training.steps

    @property
    def is_mid_step(self) -> bool:
        """Whether a group is in flight, or a group is decided in the open step (the one that is being filled)."""
        draft = self.assembly.open
        return bool(self.groups.in_flight) or (draft is not None and bool(draft.decided))

    @property
    def is_drained(self) -> bool:
        """Whether nothing is played, evaluated or trained: the job may stop here without losing work."""
        idle = self.evaluation is None and not self.groups.in_flight
        return idle and not (
            self.groups.decided if self.strict else any(draft.closed for draft in self.assembly.drafts)
        )

    @property
    def issued_versions(self) -> dict[str, int]:
        """By agent, the version from which groups issued now are to be sampled. In strict mode the agent's trainer may not have committed it yet."""
        return self.assembly.next_versions if self.strict else self.versions

    def turns_from(self, last_sequence: int) -> int:
        """Return a sequence number of the stream TURNS; all turns of the job below it belong to recorded steps and evaluations.

        Args:
            last_sequence: the last sequence of the stream.
        """
        evaluation = () if self.evaluation is None else (self.groups.evaluation_from,)
        return min((*self.groups.turns_from(self.groups.indices), *evaluation), default=last_sequence + 1)

    def ledger(self) -> IssueLedger:
        """Return the ledger: the position in the training data, the open groups, and the evaluation in progress."""
        given_out, run = tuple(sorted(self.groups.indices)), self.evaluation
        return IssueLedger(
            **self._position(self.tasks.walk, self.tasks.past),
            open=given_out,
            open_from=self.groups.turns_from(given_out),
            evaluating=run.version if run else None,
            evaluating_step=run.step if run else 0,
            evaluating_versions=dict(run.versions) if run else {},
            evaluating_from=self.groups.evaluation_from,
        )

    def _position(self, walk: Walk, past: PastDraw) -> dict[str, Any]:
        """Return the fields of a DataPosition, as keyword arguments."""
        return self._names() | {
            "next_index": walk.next_visit,
            "skipped_in_pass": walk.in_pass,
            "skipped_solved": walk.solved,
            "skipped_hopeless": walk.hopeless,
            "past_step": past.step,
            "past_versions": dict(past.versions),
            "episode_bytes": self.episode_bytes,
        }

    def _names(self) -> dict[str, Any]:
        return {"namespace": self.document.namespace, "job": self.document.job, "uid": self.document.uid}

    def add_episode(self, episode: Episode) -> None:
        """Add an episode that has ended. An episode of a group that is not open (`is_open`) is ignored.

        After a restart, episodes of decided groups are read again. They count only for the share of faults.

        Raises EpisodesTooLarge.
        """
        if not self.is_open(episode.group):
            return
        self.faults.add(episode)
        kept = slim(episode)
        if episode.split is Split.EVAL:
            assert self.evaluation is not None
            if self.evaluation.add(kept):
                self.groups.count(None, kept)
        elif self.groups.is_played(index := group_index(episode.group)):
            if episode.member not in self.ended(episode.group):
                self.groups.count(index, kept)
            # A teacher's advantages compare no candidates, which then train as all other turns.
            has_teacher = self.document.spec.teacher is not None
            group = self._experience.add(kept.model_copy(update={"choices": ()}) if has_teacher else kept)
            if group is not None:
                self.groups.complete[index] = group

    def undecided(self) -> Iterator[Episode]:
        """Return the episodes of training groups that are not decided."""
        yield from self._experience.episodes()
        yield from (episode for group in self.groups.complete.values() for episode in group.episodes)

    def ended(self, group: str) -> list[int]:
        """Return the numbers of the members that have ended, in ascending order, of a group that is not complete."""
        return self._experience.ended(group)

    def open_members(self) -> set[tuple[str, int]]:
        """Return group name and member number of each episode that has not ended, of undecided groups and the evaluation in progress."""
        spec, run, ref = self.document.spec, self.evaluation, self.document.ref
        groups = {train_group(ref, index) for index in self.groups.in_flight - self.groups.complete.keys()}
        sizes = {group: spec.sampling(group).group_size for group in groups}
        members = {
            (group, one) for group, size in sizes.items() for one in set(range(size)).difference(self.ended(group))
        }
        if run is not None:
            members |= {(eval_group(ref, index, run.version), member) for index, member in run.missing()}
        return members

    def is_open(self, group: str) -> bool:
        """Return whether a group is issued and its step is not on record, or whether it belongs to the evaluation in progress."""
        return self._has(self.groups.indices, group)

    def is_undecided(self, group: str) -> bool:
        """Return whether a group is in flight, or belongs to the evaluation in progress."""
        return self._has(self.groups.in_flight, group)

    def issuing(self, number: int, last_sequence: int) -> TasksIssued:
        """Return the decision to issue the next `number` groups, with the past versions that play in them.

        Args:
            last_sequence: last sequence of the stream TURNS, as of now or earlier.
        """
        indices, walk = self.tasks.next(number)
        draft = self.assembly.open
        past = self.tasks.drawn(self.finished if draft is None else draft.step, self.issued_versions)
        return TasksIssued(**self._position(walk, past), indices=tuple(indices), turns_from=last_sequence + 1)

    def beginning(self, run: EvaluationRun, last_sequence: int) -> EvaluationBegun:
        """Return the decision to begin an evaluation. last_sequence: as in `issuing`."""
        numbers = {"version": run.version, "step": run.step, "turns_from": last_sequence + 1}
        return EvaluationBegun(**self._names(), **numbers, versions=dict(run.versions))

    def due_evaluation(self) -> EvaluationRun | None:
        """Return the evaluation to start now; None if none is due."""
        if self.evaluation is not None or not self.has_policies:
            return None
        return self._schedule.next(self.document.spec.evaluation, self.evaluations, self.finished, self.versions)

    def fault_totals(self) -> Counter[str]:
        """Return all faults by class since the job began, those of open groups included."""
        totals = self.recorded.faults + self._experience.faults()
        for group in self.groups.complete.values():
            totals.update(group.faults)
        for draft in self.assembly.drafts:
            totals.update(draft.faults())
        return totals + (count_faults(self.evaluation.episodes.values()) if self.evaluation else Counter())

    def _has(self, indices: Collection[int], group: str) -> bool:
        """Return whether a group is the training group of one of the indices, or belongs to the evaluation in progress."""
        if (index := eval_index(group)) is None:
            index = group_index(group)
            return index in indices and group == train_group(self.document.ref, index)
        run = self.evaluation
        if run is None or index >= run.settings.num_tasks:
            return False
        return group == eval_group(self.document.ref, index, run.version)

    def _apply_step(self, record: StepRecord) -> None:
        before = self.assembly.drafts[0].agents if self.assembly.drafts else {}
        versions = self.assembly.versions | {agent: part.base_version for agent, part in before.items()}
        own = {agent: part for agent, part in record.agents.items() if agent in versions}
        after = versions | {agent: part.version for agent, part in own.items()}
        self.assembly.recorded(record.step, after, [agent for agent, part in own.items() if part.num_groups])
        self.groups.recorded(record.indices)
        self.recorded.add_step(record)
        self.tasks.add_outcomes(record.outcomes)
        self.trained_prompts.update(record.plays.prompts[: MAX_PROMPTS - len(self.trained_prompts)])
        self.finished, self.last_step = self.finished + 1, record
        self._schedule.add_step(self.document.spec, self.finished, self.assembly.versions)

    def _apply_evaluation(self, record: EvalRecord) -> None:
        self.recorded.add_evaluation(record)
        self.evaluations[record.version] = without_samples(record)
        self.evaluation = None
        self.groups.evaluated()

    def _begin_evaluation(self, version: int, step: int, turns_from: int, versions: Mapping[str, int]) -> None:
        self.groups.evaluation_from = turns_from
        if version not in self.evaluations:
            self.evaluation = EvaluationRun(version, step, self.document.spec.evaluation, versions)

    def _move_to(self, position: DataPosition) -> None:
        """Set the position in the training data, the drawn past versions and the size of an episode."""
        skipped = position.skipped_in_pass, position.skipped_solved, position.skipped_hopeless
        self.tasks.walk = Walk(position.next_index, *skipped)
        self.tasks.past = PastDraw(position.past_step, position.past_versions)
        self.episode_bytes = position.episode_bytes
