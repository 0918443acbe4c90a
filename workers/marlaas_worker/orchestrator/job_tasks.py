"""The tasks of one job: their order, their messages, the past versions that play in them, and what their groups say about their difficulty.

The order depends only on the job's seed and on past results. A *visit* is a position in the walk through the data, counted from 0 over
all passes; visit v of a set of N tasks belongs to pass v // N. A visit is issued at most once, so it is the group's index; a skipped
visit leaves a gap. The state is a `Walk` (in the job's log, written with the visits that it issued) and the results (in the step
records). After a crash both are read back, and the walk continues.

The rule for skipping tasks is a heuristic of curriculum learning for group-relative policy gradients: a group
without variance has no advantage. DAPO (arXiv 2503.14476, section 3.2) discards such groups after sampling;
skipping their tasks saves the sampling.
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from marlaas_api.messages import Difficulty, GroupResolution, JobDocument, TaskMessage, TaskOutcome
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.messages.training_settings import DataSettings, SkipSettings
from marlaas_api.names import Split, derive_seed, eval_group, train_group
from marlaas_worker.orchestrator.evaluation import EvaluationRun
from marlaas_worker.orchestrator.experience import AgentGroup, difficulty


@dataclass(frozen=True, slots=True)
class Walk:
    """The position in the order of a job's training tasks, and the numbers of skipped visits.

    The task of a visit is issued as one group, or skipped.

    Attributes:
        next_visit: the visit to issue or skip next.
        in_pass: number of visits skipped in the pass of `next_visit`.
        solved: number of visits to solved tasks skipped since the job began.
        hopeless: number of visits to hopeless tasks skipped since the job began.
    """

    next_visit: int = 0
    in_pass: int = 0
    solved: int = 0
    hopeless: int = 0


class DataOrder:
    """The order of one job's training tasks, and the known difficulties of the tasks.

    A pass visits every training task once.

    Args:
        spec: number of training tasks (None: unlimited), their order, and the rule for skipping them.
        seed: the job's seed, for the order `shuffled`.
        first: number of visits before the first pass. They play the demonstrations, another data set: visit v plays demonstration v.
    """

    def __init__(self, spec: DataSettings, seed: int, first: int = 0) -> None:
        self._spec = spec
        self._seed = seed
        self._first = first
        self._results: dict[int, dict[int, Difficulty]] = {}

    def task(self, visit: int) -> int:
        """Return the index of the task that a visit plays."""
        size = self._spec.tasks
        if visit < self._first:
            return visit
        if size is None:
            return visit - self._first
        number, offset = divmod(visit - self._first, size)
        if self._spec.order == "sequential":
            return offset
        return permuted(offset, size, derive_seed(self._seed, "order", number))

    def add(self, outcome: TaskOutcome) -> None:
        """Add the difficulty that a played visit has shown. Repeated results change nothing, and the order of the calls does not matter."""
        skip = self._spec.skip
        if skip is None or outcome.visit < self._first:
            return
        results = self._results.setdefault(outcome.index, {})
        results[outcome.visit] = outcome.difficulty
        for visit in sorted(results)[: -skip.after]:
            del results[visit]

    def skip_reason(self, visit: int) -> Difficulty | None:
        """Return the difficulty for which a visit's task should be skipped; None if it should be played."""
        skip, size = self._spec.skip, self._spec.tasks
        if skip is None or size is None or visit < self._first:
            return None
        results = self._results.get(self.task(visit), {})
        verdict = _shared_difficulty(results, skip)
        if verdict is None:
            return None
        passes = (visit - self._first) // size - (max(results) - self._first) // size
        return verdict if passes <= skip.passes else None

    def take(self, walk: Walk, number: int) -> tuple[list[int], Walk]:
        """Return the next `number` visits to issue, without the visits that are skipped (`skip_reason`), and the walk after them."""
        visits: list[int] = []
        while len(visits) < number:
            visit, walk = walk.next_visit, self._at_pass(walk)
            verdict = self.skip_reason(visit) if self._may_skip(walk) else None
            if verdict is None:
                visits.append(visit)
                walk = replace(walk, next_visit=visit + 1)
            else:
                walk = _skipped(walk, verdict)
        return visits, walk

    def _at_pass(self, walk: Walk) -> Walk:
        begins = self._spec.tasks is not None and (walk.next_visit - self._first) % self._spec.tasks == 0
        return replace(walk, in_pass=0) if begins else walk

    def _may_skip(self, walk: Walk) -> bool:
        """Return whether the next visit may be skipped.

        At every point of a pass, at most the share `max_share` of its visits so far is skipped, so tasks are always issued.
        """
        skip, size = self._spec.skip, self._spec.tasks
        if skip is None or size is None:
            return False
        return walk.in_pass + 1 <= skip.max_share * ((walk.next_visit - self._first) % size + 1)


_FEISTEL_ROUNDS = 4


def permuted(offset: int, size: int, seed: int) -> int:
    """Return the image of `offset` under a seeded permutation of 0..size-1, without storing the permutation.

    Uses a Feistel network over the next power of four, repeated until the result is below `size` (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002, method 2: cycle walking).
    """
    bits = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = offset >> bits, offset & mask
        for number in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (derive_seed(seed, number, right) & mask)
        offset = left << bits | right
        if offset < size:
            return offset


def _shared_difficulty(results: dict[int, Difficulty], skip: SkipSettings) -> Difficulty | None:
    """Return the difficulty, SOLVED or HOPELESS, that the last groups of a task have in common.

    Return None if the difficulties differ, if the groups have signal (VARIED), or if there are fewer groups than `skip.after`.

    Args:
        results: difficulties of the task's last groups, by visit.
    """
    found = set(results.values())
    if len(results) < skip.after or len(found) != 1 or found == {Difficulty.VARIED}:
        return None
    return found.pop()


def _skipped(walk: Walk, verdict: Difficulty) -> Walk:
    return Walk(
        next_visit=walk.next_visit + 1,
        in_pass=walk.in_pass + 1,
        solved=walk.solved + (verdict is Difficulty.SOLVED),
        hopeless=walk.hopeless + (verdict is Difficulty.HOPELESS),
    )


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
