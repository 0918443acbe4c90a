"""Space in the stream TURNS for each job, limited so that the stream does not fill up. Pure, but for `StreamSpace.refresh`.

The turns of a step are needed until the step is recorded. Without limits, the stream could be full of turns of
unfinished steps, and no step could finish. So a job begins a step only if the whole step fits, including
refills and an evaluation. It keeps that space until it has no open groups (the banker's algorithm, Dijkstra,
EWD-108). Sizes are estimates; if the stream is full anyway, turns wait.
"""

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from marlaas_api import subjects
from marlaas_api.bus import Bus, StreamState
from marlaas_api.messages.job_spec import JobSpec

MAX_HELD = 0.75
"""Part of the stream that jobs may hold by estimate; the rest is a reserve for estimates that are too low."""
TIGHT = 0.5
"""Fill level of the stream from which consumed turns are purged at once, not one step later."""
FULL = 0.95
MARGIN = 1.25
STATE_AGE_S = 0.5
"""Seconds for which the stream's state is reused. An old one is safe: its sequence is a lower bound, and turns wait if the stream is full."""
WINDOW_S = 20.0
"""Seconds of one measurement of an episode's size; replicas report every two seconds."""
NUM_WINDOWS = 4
_FIRST_PART = 1 << 15
_BYTES_PER_TOKEN = 16
_BYTES_PER_TURN = 2048


@dataclass(frozen=True, slots=True)
class SpaceNeed:
    """Bytes of the stream that one job holds, and that it may need.

    Attributes:
        held: bytes of the turns of the job's open groups and its evaluation, whether written already or not.
        step: bytes of a step with all refills, plus those of an evaluation. The sum is reduced to what one job may have, unless a step
            without refills is known to need more.
        wanted: `step`, plus the bytes of the steps that may be played ahead.
    """

    held: int
    step: int
    wanted: int

    @property
    def reserved(self) -> int:
        """Bytes that no other job may have: a job with open groups must be able to finish its step."""
        return max(self.held, self.step) if self.held else 0

    @property
    def most(self) -> int:
        """Bytes that the job may hold if there is enough for all jobs."""
        return max(self.held, self.step, self.wanted)


def bounds(total: int, needs: Mapping[str, SpaceNeed]) -> dict[str, int]:
    """Return the bytes that each job may hold, by uid; jobs begin a step in the order of `needs`.

    The sum exceeds `total` only if the reserved bytes do. A job without open groups gets its whole step or
    nothing. While a job waits to begin, no job behind it begins, unless the waiting job's step exceeds the
    total and so never fits. While no job waits, the rest is shared out evenly, up to `wanted`.

    Args:
        total: bytes for all jobs.
        needs: by job uid.
    """
    granted = {uid: need.reserved for uid, need in needs.items()}
    left, waits = max(0, total - sum(granted.values())), False
    for uid, need in needs.items():
        if granted[uid] or need.step > total:
            continue
        waits = waits or need.step > left
        if not waits:
            granted[uid] = need.step
            left -= need.step
    if not waits:
        for uid, more in _even(
            left, {uid: needs[uid].wanted - bound for uid, bound in granted.items() if bound}
        ).items():
            granted[uid] += more
    return granted


def _even(left: int, wishes: Mapping[str, int]) -> dict[str, int]:
    """Share out `left` bytes evenly; return the bytes by job. No job gets more than its wish, and the remainder goes to the others."""
    given = {}
    for num_done, (uid, wish) in enumerate(sorted(wishes.items(), key=lambda pair: pair[1])):
        given[uid] = max(0, min(wish, left // (len(wishes) - num_done)))
        left -= given[uid]
    return given


class StreamSpace:
    """Shares out the space of the stream TURNS among the jobs. Jobs begin a step in the order in which they began to wait.

    state: size and limit of the stream, as of the last `refresh`.
    """

    def __init__(self) -> None:
        self.state = StreamState(0, 0, -1)
        self._read_at = -math.inf
        self._needs: dict[str, SpaceNeed] = {}
        self._held = self._most = 0
        self._waiting: dict[str, None] = {}

    @property
    def total(self) -> int:
        """Bytes that all jobs together may hold.

        This is MAX_HELD of the stream's limit, less the stored bytes that exceed what the jobs hold by estimate: turns that are not purged
        yet, or are larger than estimated.
        """
        if self.state.max_bytes <= 0:
            return 1 << 62
        return max(0, int(MAX_HELD * self.state.max_bytes) - max(0, self.state.num_bytes - self._held))

    @property
    def capacity(self) -> int:
        """Bytes that one job could have if it were alone."""
        return 1 << 62 if self.state.max_bytes <= 0 else int(MAX_HELD * self.state.max_bytes)

    def is_filled(self, part: float) -> bool:
        """Return whether the stream is filled to at least this part of its limit."""
        return 0 < part * self.state.max_bytes <= self.state.num_bytes

    async def refresh(self, bus: Bus, max_age_s: float = STATE_AGE_S) -> StreamState:
        """Read the stream's state, unless it was read within `max_age_s`, and return it."""
        now = asyncio.get_running_loop().time()
        if now - self._read_at >= max_age_s:
            self.state = await bus.state(subjects.TURNS)
            self._read_at = now
        return self.state

    def update(self, uid: str, need: SpaceNeed, *, asks: bool) -> None:
        """Set a job's need. asks: whether the job wants more space; if not, it leaves the waiting order."""
        self._set(uid, need)
        if not asks:
            self._waiting.pop(uid, None)

    def request(self, uid: str, need: SpaceNeed) -> int:
        """Set a job's need and return the bytes that it may hold now. If that is less than a step, the job waits."""
        self._set(uid, need)
        if self._most <= self.total:  # enough for all wishes, so the other jobs need not be looked at
            bound = need.most
        else:
            order = dict.fromkeys([*self._waiting, *(one for one, other in self._needs.items() if other.held), uid])
            bound = bounds(self.total, {one: self._needs[one] for one in order})[uid]
        if bound >= need.step:
            self._waiting.pop(uid, None)
        else:
            self._waiting.setdefault(uid)
        return bound

    def release(self, uid: str) -> None:
        """Release a job's space."""
        self._set(uid, None)
        self._waiting.pop(uid, None)

    def _set(self, uid: str, need: SpaceNeed | None) -> None:
        """Replace a job's need, and update the sums over all jobs. need: None removes it."""
        before = self._needs.pop(uid, None) if need is None else self._needs.get(uid)
        for one, sign in ((before, -1), (need, 1)):
            if one is not None:
                self._held += sign * one.held
                self._most += sign * one.most
        if need is not None:
            self._needs[uid] = need


@dataclass(slots=True)
class EpisodeSize:
    """Bytes of turns that an episode adds to the stream: the maximum of the latest measurements, plus a margin.

    known: the estimate; 0 before the first measurement.
    """

    known: int = 0
    _windows: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_WINDOWS))
    _began: tuple[float, float, int] | None = None

    def see(self, now: float, num_bytes: float, num_episodes: int) -> None:
        """Measure from running totals.

        Args:
            now: seconds of any clock.
            num_bytes: bytes of turns recorded since a fixed time.
            num_episodes: number of episodes that have ended since a fixed time.
        """
        if self._began is None:
            self._began = (now, num_bytes, num_episodes)
        began, bytes_before, episodes_before = self._began
        new_bytes, new_episodes = num_bytes - bytes_before, num_episodes - episodes_before
        if now - began < WINDOW_S or new_bytes <= 0 or new_episodes <= 0:
            return
        self._windows.append(new_bytes / new_episodes)
        self.known = math.ceil(MARGIN * max(self._windows))
        self._began = (now, num_bytes, num_episodes)

    def bytes(self, spec: JobSpec, capacity: int) -> int:
        """Return the estimate; before the first measurement, the largest size that the spec allows, or 1/32768 of `capacity` if that is less."""
        if self.known:
            return self.known
        rollout = spec.rollout
        most = len(spec.agents) * rollout.max_turns * (rollout.max_tokens * _BYTES_PER_TOKEN + _BYTES_PER_TURN)
        return max(1, min(most, capacity // _FIRST_PART))


class JobSpace:
    """Takes and releases space in the stream TURNS for the groups and the evaluation of one job.

    Attributes:
        why: why the job has no space to issue groups or to evaluate now, as text; empty if it has space, or asked for none.
        is_demonstrated: whether the job's groups are demonstrations now, of one episode each. The caller sets it.

    Args:
        stream: the space that all jobs share.
        uid: the job's uid.
        spec: the job's spec, which has the sizes of groups, steps and evaluations.
        size: estimated size of the job's episodes, which the caller updates.
    """

    def __init__(self, stream: StreamSpace, uid: str, spec: JobSpec, size: EpisodeSize) -> None:
        self.size = size
        self.why = ""
        self.is_demonstrated = False
        self._stream, self._uid, self._spec = stream, uid, spec

    def update(self, num_open: int, *, evaluating: bool, asks: bool) -> None:
        """Set the space that the job holds. `why` becomes empty.

        Args:
            num_open: number of the job's open groups.
            evaluating: whether an evaluation is in progress.
            asks: whether the job wants more space; if not, it leaves the waiting order.
        """
        self.why = ""
        self._stream.update(self._uid, self._need(num_open, evaluating), asks=asks)

    def take(self, num_open: int, wanted: int, *, evaluating: bool) -> int:
        """Take space for up to `wanted` more groups; return the number of groups that may be issued. If it is 0, `why` may say why.

        num_open: number of the job's open groups. evaluating: whether an evaluation is in progress.
        """
        bound = self._stream.request(self._uid, self._need(num_open, evaluating))
        num = max(0, min(wanted, (bound - self._evaluation()) // self._group() - num_open))
        if num == 0 and num_open < self._most() + self._ahead():  # with more, it waits for its own trainers
            self.why = self._explain()
        self._stream.update(self._uid, self._need(num_open + num, evaluating), asks=num == 0)
        return num

    def may_evaluate(self, num_open: int) -> bool:
        """Return whether an evaluation may begin, and take its space if so. A job with open groups has space for one already.

        num_open: number of the job's open groups.
        """
        if num_open == 0 and self._stream.request(self._uid, self._need(0, False)) < self._evaluation():
            self.why = self._explain()
            return False
        self._stream.update(self._uid, self._need(num_open, True), asks=False)
        return True

    def release(self) -> None:
        """Release all space that the job holds."""
        self._stream.release(self._uid)

    def _need(self, num_open: int, evaluating: bool) -> SpaceNeed:
        group, evaluation = self._group(), self._evaluation()
        step = self._most() * group + evaluation
        if not self.size.known or self._fewest() * group + evaluation <= self._stream.capacity:
            step = min(step, self._stream.capacity)
        held = num_open * group + evaluation if num_open or evaluating else 0
        return SpaceNeed(held, step, step + self._ahead() * group)

    def _fewest(self) -> int:
        """Return the number of groups of a step without refills."""
        return self._spec.rows_per_step if self.is_demonstrated else self._spec.training.groups_per_step

    def _most(self) -> int:
        """Return the number of groups of a step with all refills; demonstrations have no refills."""
        return self._fewest() * (1 if self.is_demonstrated else 1 + self._spec.training.max_refill)

    def _ahead(self) -> int:
        """Return the number of groups in the steps that may be played ahead of the oldest step that is not recorded."""
        return self._fewest() * self._spec.steps_ahead

    def _group(self) -> int:
        num_episodes = 1 if self.is_demonstrated else self._spec.rollout.group_size
        return num_episodes * self.size.bytes(self._spec, self._stream.capacity)

    def _evaluation(self) -> int:
        return self._spec.evaluation.num_episodes * self.size.bytes(self._spec, self._stream.capacity)

    def _explain(self) -> str:
        step, state, most = self._need(0, False).step, self._stream.state, self._stream.capacity
        text = f"a step may need {_mib(step)} MiB of turns, and the stream TURNS has {_mib(state.num_bytes)} of {_mib(state.max_bytes)} MiB in use"
        if step <= most:
            return f"{text}: waiting until other jobs have finished a step"
        return f"{text}, of which one job may have {_mib(most)}: lower groupsPerStep, groupSize or the tasks and samples of the evaluation, or have the stream enlarged"


def _mib(num_bytes: int) -> int:
    return math.ceil(num_bytes / 2**20)
