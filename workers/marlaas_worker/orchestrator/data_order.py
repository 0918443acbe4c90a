"""The order of training tasks. It depends only on the job's seed and on past results.

A *visit* is a position in the walk through the data, counted from 0 over all passes; visit v of a set of N
tasks belongs to pass v // N. A visit is issued at most once, so it is the group's index; a skipped visit leaves a
gap. The state is a `Walk` (in the job's log, written with the visits that it issued) and the results (in the step
records). After a crash both are read back, and the walk continues.

The rule for skipping tasks is a heuristic of curriculum learning for group-relative policy gradients: a group
without variance has no advantage. DAPO (arXiv 2503.14476, section 3.2) discards such groups after sampling;
skipping their tasks saves the sampling.
"""

from dataclasses import dataclass, replace

from marlaas_api.messages import Difficulty, TaskOutcome
from marlaas_api.messages.training_settings import DataSettings, SkipSettings
from marlaas_api.names import derive_seed

_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Walk:
    """The position in the order of a job's training tasks, and the numbers of skipped visits.

    A visit is one position in that order, counted from 0 over all passes. Its task is issued as one group, or skipped.

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

    A visit is a position in the order, counted from 0; a pass visits every training task once.

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
        verdict = _difficulty(results, skip)
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


def permuted(offset: int, size: int, seed: int) -> int:
    """Return the image of `offset` under a seeded permutation of 0..size-1, without storing the permutation.

    Uses a Feistel network over the next power of four, repeated until the result is below `size` (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002, method 2: cycle walking).
    """
    bits = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = offset >> bits, offset & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (derive_seed(seed, number, right) & mask)
        offset = left << bits | right
        if offset < size:
            return offset


def _difficulty(results: dict[int, Difficulty], skip: SkipSettings) -> Difficulty | None:
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
