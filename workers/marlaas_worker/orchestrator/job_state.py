"""The state of one job and every decision about it, without I/O.

The state depends only on the records (History) and on the episodes since then. So a restart after a crash and
the original run reach the same state. `owned_job` performs the decisions, and passes the results back.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from marlaas_api.messages import (
    Episode,
    EvalRecord,
    GroupLogEntry,
    GroupResolution,
    IssueLedger,
    JobDocument,
    PolicyRecord,
    StepClosed,
    StepRecord,
    TaskMessage,
    TaskOutcome,
    UsageAmounts,
)
from marlaas_api.names import Split, derive_seed, eval_group, train_group
from marlaas_worker.orchestrator.data_order import DataOrder, Walk
from marlaas_worker.orchestrator.evaluation import EvaluationRun, due
from marlaas_worker.orchestrator.experience import CompleteGroup, Experience, count_faults, difficulty, group_index
from marlaas_worker.orchestrator.faults import FaultWatch
from marlaas_worker.orchestrator.recorded_totals import RecordedTotals
from marlaas_worker.orchestrator.steps import Assembly, StepRules


@dataclass(frozen=True, slots=True)
class History:
    """The records of a job in streams and buckets, read when the orchestrator takes up the job."""

    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[EvalRecord, ...] = ()
    groups: tuple[GroupLogEntry, ...] = ()
    ledger: IssueLedger | None = None
    policy: PolicyRecord = field(default_factory=lambda: PolicyRecord(uid=""))


class JobState:
    """State of one job with one trainable agent. The schemas allow more agents; admission does not admit such jobs yet."""

    def __init__(self, document: JobDocument, history: History) -> None:
        spec = document.spec
        self.document = document
        self.agent = spec.agents[0].name
        self.policy = history.policy
        self.evaluations = {record.version: record for record in history.evaluations}
        self.finished = len(history.steps)
        self.last_step = history.steps[-1] if history.steps else None
        self.evaluation: EvaluationRun | None = None
        self.walk = Walk()
        self._order = DataOrder(spec.training.data, document.seed)
        self.in_flight: set[int] = set()
        self._turns_from: dict[int, int] = {}
        self._evaluation_turns_from = 1
        self.episode_bytes = 0
        self.waits = self.pauses = ""
        self.complete: dict[int, CompleteGroup] = {}
        self.recorded = RecordedTotals(history.steps, history.evaluations)
        for step in history.steps:
            self._note_outcomes(step)
        self._experience = Experience(self.agent, spec.rollout.group_size)
        group = spec.rollout.group_size
        window = max(2 * group, group * spec.training.groups_per_step)
        self.faults = FaultWatch(window, spec.environment.max_fault_share, at_least=group)
        version = history.policy.version
        if history.policy.step >= self.finished:  # The trainer has committed steps that are not recorded yet.
            version = self.last_step.version if self.last_step else 0
        self.assembly = Assembly(document.ref, self.agent, self._rules(), self.finished, version)
        self.assembly.restore(history.groups)
        resolved = [group for draft in self.assembly.drafts for group in draft.resolved]
        self.unrecorded = {group.index for group in resolved}
        for outcome in self.outcomes(resolved):
            self._order.note(outcome)
        if history.ledger is not None:
            self._restore_ledger(history.ledger, history.steps)

    @property
    def strict(self) -> bool:
        """Whether training is strictly on-policy: maxStaleness is 0."""
        return self.document.spec.training.max_staleness == 0

    @property
    def training_over(self) -> bool:
        """Whether every step is on record."""
        return self.finished >= self.document.spec.training.steps

    @property
    def num_open(self) -> int:
        """Number of issued groups whose step is not on record."""
        return len(self.in_flight | self.unrecorded)

    @property
    def is_drained(self) -> bool:
        """Whether nothing is played, evaluated or trained: the job may stop here without losing work."""
        idle = self.evaluation is None and not self.in_flight
        return idle and not (self.unrecorded if self.strict else any(draft.closed for draft in self.assembly.drafts))

    def turns_from(self, last_sequence: int) -> int:
        """Return a sequence of TURNS below which all turns belong to recorded steps and evaluations.

        Args:
            last_sequence: the last sequence of the stream.
        """
        known = [self._turns_from.get(index, 1) for index in self.in_flight | self.unrecorded]
        if self.evaluation is not None:
            known.append(self._evaluation_turns_from)
        return min(known, default=last_sequence + 1)

    def ledger(self) -> IssueLedger:
        """Return the ledger, which must be written before the tasks that it names are published."""
        given_out = tuple(sorted(self.in_flight | self.unrecorded))
        return IssueLedger(
            namespace=self.document.namespace,
            job=self.document.job,
            uid=self.document.uid,
            next_index=self.walk.next_visit,
            skipped_in_pass=self.walk.in_pass,
            skipped_solved=self.walk.solved,
            skipped_hopeless=self.walk.hopeless,
            open=given_out,
            evaluating=self.evaluation.version if self.evaluation else None,
            open_from=tuple(self._turns_from.get(index, 1) for index in given_out),
            evaluating_from=self._evaluation_turns_from,
            episode_bytes=self.episode_bytes,
        )

    def add_episode(self, episode: Episode) -> None:
        """Add an episode. A restart reads those of resolved groups again; they count only for the share of faults."""
        if not self.is_open(episode):
            return
        self.faults.add(episode)
        if episode.split is Split.EVAL:
            assert self.evaluation is not None
            self.evaluation.add(episode)
        elif (index := group_index(episode.group)) in self.in_flight and index not in self.complete:
            group = self._experience.add(episode)
            if group is not None:
                self.complete[index] = group

    def is_open(self, episode: Episode) -> bool:
        """Return whether an episode belongs to the evaluation in progress, or to a group that is issued and not recorded."""
        if episode.split is Split.EVAL:
            run = self.evaluation
            return run is not None and episode.group == eval_group(self.document.ref, episode.index, run.version)
        index = group_index(episode.group)
        is_ours = episode.group == train_group(self.document.ref, index)
        return is_ours and (index in self.in_flight or index in self.unrecorded)

    def resolvable(self) -> list[CompleteGroup]:
        """Return the complete groups that may be decided now; in strict mode, those before the first incomplete index."""
        if not self.strict:
            return list(self.complete.values())
        ready: list[CompleteGroup] = []
        for index in sorted(self.in_flight):
            if index not in self.complete:
                break
            ready.append(self.complete[index])
        return ready

    def resolve(self, group: CompleteGroup, version: int, usage: UsageAmounts | None = None) -> list[GroupLogEntry]:
        """Decide one group; return the messages to log, in order. Arguments as in `Assembly.resolve`."""
        del self.complete[group.index]
        self.in_flight.discard(group.index)
        self.unrecorded.add(group.index)
        messages = self.assembly.resolve(group, version, usage)
        for outcome in self.outcomes(one for one in messages if not isinstance(one, StepClosed)):
            self._order.note(outcome)
        return messages

    def record(self, record: StepRecord) -> None:
        """Update the state after a step was recorded."""
        draft = self.assembly.drafts[0]
        self.assembly.recorded(draft, record.version)
        self.recorded.add_step(record)
        self._note_outcomes(record)
        done = {group.index for group in draft.resolved}
        self.unrecorded -= done
        self._turns_from = {index: first for index, first in self._turns_from.items() if index not in done}
        self.finished = record.step + 1
        self.last_step = record

    def take_indices(self, number: int, last_sequence: int) -> list[int]:
        """Reserve the next tasks to issue; they are in flight from now on.

        Args:
            last_sequence: of TURNS, as of now or earlier.
        """
        indices, self.walk = self._order.take(self.walk, number)
        self.in_flight.update(indices)
        self._turns_from |= dict.fromkeys(indices, last_sequence + 1)
        return indices

    def begin_evaluation(self, run: EvaluationRun, last_sequence: int) -> None:
        """Set the evaluation in progress.

        Args:
            last_sequence: of TURNS, as of now or earlier.
        """
        self.evaluation, self._evaluation_turns_from = run, last_sequence + 1

    def due_evaluation(self) -> EvaluationRun | None:
        """Return the evaluation to start now; None if none is due."""
        spec = self.document.spec
        version = self.policy.version
        if self.evaluation is not None or version < 0 or version in self.evaluations:
            return None
        if not due(spec.evaluation, self.finished, spec.training.steps):
            return None
        return EvaluationRun(version, self.finished, spec.evaluation.tasks)

    def record_evaluation(self, record: EvalRecord) -> None:
        """Update the state after an evaluation was recorded."""
        self.evaluations[record.version] = record
        self.recorded.add_evaluation(record)
        self.evaluation = None

    def fault_totals(self) -> Counter[str]:
        """Return all faults by class since the job began, those of open groups included."""
        totals = self.recorded.faults + self._experience.faults()
        for group in self.complete.values():
            totals.update(group.faults)
        for draft in self.assembly.drafts:
            totals.update(draft.faults())
        return totals + (count_faults(self.evaluation.episodes.values()) if self.evaluation else Counter())

    def train_task(self, index: int) -> TaskMessage:
        """Return the task message of a training group."""
        return self._task(train_group(self.document.ref, index), Split.TRAIN, self._order.task(index))

    def outcomes(self, groups: Iterable[GroupResolution]) -> tuple[TaskOutcome, ...]:
        """Return the difficulties of the groups' tasks, for the step record; empty if the job never skips tasks."""
        skip = self.document.spec.training.data.skip
        if skip is None:
            return ()
        found = [(group.index, difficulty(group.outcome, group.rewards, skip.solved_reward)) for group in groups]
        return tuple(
            TaskOutcome(index=self._order.task(visit), visit=visit, difficulty=known)
            for visit, known in found
            if known is not None
        )

    def unrecorded_skips(self) -> tuple[int, int]:
        """Return the visits to solved and to hopeless tasks that were skipped since the last recorded step."""
        skipped = self.recorded.skips
        return self.walk.solved - skipped["solved"], self.walk.hopeless - skipped["hopeless"]

    def eval_tasks(self, run: EvaluationRun) -> list[TaskMessage]:
        """Return the tasks of an evaluation that have not ended."""
        missing = [index for index in range(run.num_tasks) if index not in run.episodes]
        return [self._task(eval_group(self.document.ref, index, run.version), Split.EVAL, index) for index in missing]

    def _task(self, group: str, split: Split, index: int) -> TaskMessage:
        document = self.document
        return TaskMessage(
            namespace=document.namespace,
            job=document.job,
            uid=document.uid,
            group=group,
            split=split,
            index=index,
            seed=derive_seed(document.seed, split.value, index),
            group_size=document.spec.rollout.group_size if split is Split.TRAIN else 1,
        )

    def _note_outcomes(self, record: StepRecord) -> None:
        for outcome in record.outcomes:
            self._order.note(outcome)

    def _rules(self) -> StepRules:
        training = self.document.spec.training
        return StepRules(training.groups_per_step, training.max_staleness, training.max_refill, training.steps)

    def _restore_ledger(self, ledger: IssueLedger, steps: tuple[StepRecord, ...]) -> None:
        done = {index for record in steps for index in record.indices}
        self.walk = Walk(ledger.next_index, ledger.skipped_in_pass, ledger.skipped_solved, ledger.skipped_hopeless)
        self.in_flight = set(ledger.open) - done - self.unrecorded
        self._turns_from = dict(zip(ledger.open, ledger.open_from, strict=False))
        self._evaluation_turns_from = ledger.evaluating_from
        self.episode_bytes = ledger.episode_bytes
        version = ledger.evaluating
        if version is not None and version not in self.evaluations:
            self.evaluation = EvaluationRun(version, self.finished, self.document.spec.evaluation.tasks)
