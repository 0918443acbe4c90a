"""The tasks of one job: their order, their messages, the past versions that play in them, and what their groups say about their difficulty."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from marlaas_api.messages import GroupResolution, JobDocument, TaskMessage, TaskOutcome
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.names import Split, derive_seed, eval_group, train_group
from marlaas_worker.orchestrator.data_order import DataOrder, Walk
from marlaas_worker.orchestrator.evaluation import EvaluationRun
from marlaas_worker.orchestrator.experience import AgentGroup, difficulty


@dataclass(frozen=True, slots=True)
class PastDraw:
    """The past policy versions that were drawn for a step.

    Attributes:
        step: the drawn versions play in the groups that are issued while this is the open step; -1 before the first draw.
        versions: the drawn version of each agent that plays past versions of another agent's policy, by the agent's name.
    """

    step: int = -1
    versions: Mapping[str, int] = field(default_factory=dict)


def past_players(document: JobDocument) -> list[AgentSettings]:
    """Return the agents that play past versions of another agent's policy."""
    return [agent for agent in document.spec.agents if agent.plays_past]


class JobTasks:
    """Makes the task messages of one job, and draws the past policy versions that its agents with `policy.versions: past` play.

    Attributes:
        walk: position in the training data after the tasks issued so far.
        past: past versions that play in the step of the newest issued tasks; `PastDraw()` before the first draw.
    """

    def __init__(self, document: JobDocument) -> None:
        self._document = document
        self._order = DataOrder(document.spec.training.data, document.seed, document.spec.demonstrated_groups)
        self.walk, self.past = Walk(), PastDraw()

    def drawn(self, step: int, newest: Mapping[str, int]) -> PastDraw:
        """Return the past versions that play in a step. A step keeps its first draw, as the newest versions may change while it is open.

        An agent's version is drawn uniformly from the `policy.last` versions before the newest one, by the job's seed; 0 if there are none.

        Args:
            step: the open step.
            newest: newest version of each policy, by the name of its own agent.
        """
        if step == self.past.step:
            return self.past
        drawn: dict[str, int] = {}
        for agent in past_players(self._document):
            assert agent.policy is not None
            last = newest[agent.policy_name]
            oldest = max(0, last - agent.policy.last)
            drawn[agent.name] = oldest + derive_seed(self._document.seed, agent.name, step) % max(1, last - oldest)
        return PastDraw(step, drawn)

    def next(self, number: int) -> tuple[list[int], Walk]:
        """Return the indices of the next `number` groups to issue, and the position in the training data after them."""
        return self._order.take(self.walk, number)

    def add_outcomes(self, outcomes: Iterable[TaskOutcome]) -> None:
        """Add results of tasks. Repeated results change nothing."""
        for outcome in outcomes:
            self._order.add(outcome)

    def outcomes(self, groups: Iterable[GroupResolution]) -> tuple[TaskOutcome, ...]:
        """Return the known difficulties of the groups' tasks, for the step record; empty if the job never skips tasks.

        Args:
            groups: the decisions about the groups for all agents, in any order.
        """
        by_index: dict[int, list[GroupResolution]] = {}
        for group in groups:
            by_index.setdefault(group.index, []).append(group)
        return tuple(outcome for index, parts in by_index.items() for outcome in self.outcome(index, parts))

    def outcome(self, visit: int, parts: Iterable[GroupResolution | AgentGroup]) -> list[TaskOutcome]:
        """Return the difficulty of a group's task, as a list of one; empty if it is not known, or the job never skips tasks.

        Args:
            visit: index of the group.
            parts: the parts of the group, or the decisions about it, one for each policy.
        """
        skip = self._document.spec.training.data.skip
        known = difficulty(parts, skip.solved_reward) if skip is not None else None
        return [TaskOutcome(index=self._order.task(visit), visit=visit, difficulty=known)] if known is not None else []

    def new_skips(self, recorded: Mapping[str, int]) -> tuple[int, int]:
        """Return how many visits to solved, and how many to hopeless tasks were skipped and are in no step record yet.

        Args:
            recorded: numbers of skipped visits in the step records, by difficulty: `solved`, `hopeless`.
        """
        return self.walk.solved - recorded["solved"], self.walk.hopeless - recorded["hopeless"]

    def train(self, index: int) -> TaskMessage:
        """Return the task message of a training group."""
        return self._task(train_group(self._document.ref, index), Split.TRAIN, self._order.task(index))

    def missing(self, run: EvaluationRun) -> list[TaskMessage]:
        """Return the task messages of an evaluation, without the tasks whose episodes have all ended."""
        missing: dict[int, set[int]] = {}
        for index, member in run.missing():
            missing.setdefault(index, set()).add(member)
        return [self._held_out(run, index, members) for index, members in missing.items()]

    def _held_out(self, run: EvaluationRun, index: int, missing: Set[int]) -> TaskMessage:
        suite, task = run.settings.at(index)
        message = self._task(eval_group(self._document.ref, index, run.version), Split.EVAL, task)
        ended = tuple(sorted(set(range(suite.samples)) - missing))
        return message.model_copy(update={"index": index, "task": task, "group_size": suite.samples, "ended": ended})

    def _task(self, group: str, split: Split, index: int) -> TaskMessage:
        document = self._document
        return TaskMessage(
            namespace=document.namespace,
            job=document.job,
            uid=document.uid,
            group=group,
            split=split,
            index=index,
            seed=derive_seed(document.seed, split.value, index),
            group_size=document.spec.sampling(group).group_size,
        )
