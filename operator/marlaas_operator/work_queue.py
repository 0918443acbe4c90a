"""Work queue of objects to reconcile: each key runs at most once at a time, and failures are retried with backoff.

`Schedule` decides when a key is due and `FailureBackoff` when an object's error is reported and its actions are
retried (pure, the time is an argument); `WorkQueue` waits and runs the handler.
"""

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.errors import MarlaasError, Retryable
from marlaas_api.reasons import Reason
from marlaas_operator.cluster import Conflict, Forbidden, Invalid, NoAnswer, Target, TooMany
from marlaas_operator.job_documents import Stale
from marlaas_operator.plan import Action

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 60.0
CHANGED_RETRY_S = 1.0
"""Longest backoff of a key that was added while it failed."""
REFUSED_AGAIN_S = 30.0
"""Refused actions are retried after this time."""
LASTING_S = 10.0
"""A transient error is reported in the status once it has lasted this long. A refusal is reported at once."""
_CONFLICT_S = 0.05
_PERMANENT_FROM_S = 5.0
_FEW = 64

Actions = tuple[Action, ...]


def backoff_s(failures: int, error: Exception) -> float:
    """Return the seconds to wait after the n-th failure in a row (from 1), doubling up to a minute.

    Retryable errors start at 0.2 s and conflicts at 0.05 s. Permanent errors start at 5 s, because a person
    must act first. The `Retry-After` of a 429 is the minimum.
    """
    first = FIRST_RETRY_S if isinstance(error, Retryable) else _PERMANENT_FROM_S
    if isinstance(error, Conflict):
        first = _CONFLICT_S
    wait_s = min(first * 2.0 ** min(failures - 1, 20), LONGEST_RETRY_S)
    return max(wait_s, error.retry_after_s) if isinstance(error, TooMany) else wait_s


class Schedule(Generic[K]):
    """Keys and the times at which they are due. A running key is not returned a second time."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = itertools.count()
        self._running: set[K] = set()
        self._failures: dict[K, int] = {}
        self._closed_until = 0.0

    def __len__(self) -> int:
        """Return the number of waiting keys, due or not."""
        return len(self._due)

    @property
    def running(self) -> int:
        """Number of keys in progress."""
        return len(self._running)

    def add(self, key: K, at: float) -> None:
        """Schedule a key for time `at`; an earlier time that is already set stays."""
        if at < self._due.get(key, math.inf):
            self._due[key] = at
            if key not in self._running:
                self._push(key)

    def take(self, now: float) -> K | None:
        """Return the key that has been due longest and mark it as running; None if none is due."""
        at = self.next_at()
        if at is None or at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        self._running.add(key)
        return key

    def next_at(self) -> float | None:
        """Return when `take` next returns a key; None if only `add`, `done` or `failed` can change that."""
        while self._heap and self._stale(self._heap[0]):
            heapq.heappop(self._heap)
        return max(self._heap[0][0], self._closed_until) if self._heap else None

    def done(self, key: K, next_at: float | None = None) -> None:
        """Record a success; schedule the key for `next_at` if given."""
        self._failures.pop(key, None)
        self._end(key, next_at)

    def failed(self, key: K, error: Exception, now: float) -> float:
        """Record a failure; schedule the key again and return the backoff in seconds.

        If the key was added meanwhile, the backoff is at most `CHANGED_RETRY_S`: the change may be a deletion.
        After a 429, no key starts before its `Retry-After`.
        """
        self._failures[key] = failures = self._failures.get(key, 0) + 1
        wait_s = backoff_s(failures, error)
        if isinstance(error, TooMany):
            self._closed_until = max(self._closed_until, now + error.retry_after_s)
        if self._due.pop(key, None) is not None:
            wait_s = min(wait_s, CHANGED_RETRY_S)
        self._end(key, now + wait_s)
        return wait_s

    def _end(self, key: K, next_at: float | None) -> None:
        self._running.discard(key)
        if next_at is not None:
            self._due[key] = min(next_at, self._due.get(key, math.inf))
        if key in self._due:
            self._push(key)

    def _push(self, key: K) -> None:
        """Push a key on the heap; its earlier entries become stale.

        Stale entries are dropped when due, or when there are too many.
        """
        heapq.heappush(self._heap, (self._due[key], next(self._order), key))
        if len(self._heap) > 2 * len(self._due) + _FEW:
            self._heap = sorted(entry for entry in self._heap if not self._stale(entry))

    def _stale(self, entry: tuple[float, int, K]) -> bool:
        at, _, key = entry
        return key in self._running or self._due.get(key) != at

    def failures(self, key: K) -> int:
        """Return the number of failures in a row."""
        return self._failures.get(key, 0)


Handler = Callable[[K], Awaitable[float | None]]
"""Handles a key; returns after how many seconds to requeue it, or None."""


class WorkQueue(Generic[K]):
    """A schedule with workers.

    now: seconds of any monotonic clock.

    Attributes:
        on_end: called after each run with the key, the error (None: success) and the duration in seconds.
        started_at: when the last run began, by `now`.
    """

    def __init__(self, handler: Handler[K], *, now: Callable[[], float], num_workers: int = 16) -> None:
        self.schedule: Schedule[K] = Schedule()
        self.on_end: Callable[[K, Exception | None, float], None] = lambda key, error, seconds: None
        self.started_at = now()
        self._handler = handler
        self._now = now
        self._num_workers = num_workers
        self._changed = asyncio.Event()
        self._stopping = False

    def add(self, key: K, delay_s: float = 0.0) -> None:
        """Schedule a key after `delay_s`; calls until then are merged into one run."""
        self.schedule.add(key, self._now() + delay_s)
        self._changed.set()

    async def run(self) -> None:
        """Start handlers until `stop`, then wait for those in progress.

        Only this task waits for changes, so that a change wakes one task and not every worker.
        """
        async with asyncio.TaskGroup() as workers:
            while not self._stopping:
                key = self.schedule.take(self._now()) if self._has_room else None
                if key is None:
                    await self._wait()
                else:
                    workers.create_task(self._run_one(key), name=f"reconcile {key}")

    def stop(self) -> None:
        """Start no more handlers."""
        self._stopping = True
        self._changed.set()

    @property
    def _has_room(self) -> bool:
        return self.schedule.running < self._num_workers

    async def _run_one(self, key: K) -> None:
        self.started_at, began, failure = self._now(), time.perf_counter(), None
        try:
            requeue_s = await self._handler(key)
        except Exception as error:  # task boundary: an error of one object must not stop the others
            failure = error
            self._log(key, error, self.schedule.failed(key, error, self._now()))
        else:
            self.schedule.done(key, None if requeue_s is None else self._now() + requeue_s)
        self.on_end(key, failure, time.perf_counter() - began)
        self._changed.set()

    def _log(self, key: K, error: Exception, wait_s: float) -> None:
        if isinstance(error, MarlaasError):
            level = logging.DEBUG if isinstance(error, Conflict) else logging.WARNING
            log.log(level, "reconcile of %s failed: %s (retry in %.1f s)", key, error, wait_s)
        else:
            log.error("reconcile of %s failed by a bug of the operator (retry in %.1f s)", key, wait_s, exc_info=error)

    async def _wait(self) -> None:
        self._changed.clear()
        at = self.schedule.next_at() if self._has_room else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if at is None else max(at - self._now(), 0.001)):
                await self._changed.wait()


@dataclass(slots=True)
class _Failure:
    """Last error of an object.

    Attributes:
        since: start of the failures, unix seconds.
        actions: refused actions, not retried before `until` (unix seconds).
    """

    since: float
    error: MarlaasError
    actions: Actions = ()
    until: float = 0.0


class FailureBackoff:
    """Current errors of all objects."""

    def __init__(self) -> None:
        self._known: dict[Target, _Failure] = {}

    def record(self, target: Target, error: MarlaasError, now: float) -> None:
        """Record the error of an action."""
        known = self._known.get(target)
        self._known[target] = _Failure(known.since if known is not None else now, error)

    def defer(self, target: Target, actions: Actions, now: float) -> None:
        """Do not retry these actions for `REFUSED_AGAIN_S`, because they were refused."""
        known = self._known[target]
        known.actions, known.until = actions, now + REFUSED_AGAIN_S

    def deferred_s(self, target: Target, actions: Actions, now: float) -> float | None:
        """Return for how many seconds the actions must not be retried; None if they may be."""
        known = self._known.get(target)
        if known is None or known.actions != actions:
            return None
        left_s = known.until - now
        return left_s if 0 < left_s <= REFUSED_AGAIN_S else None  # longer: the clock was set back

    def clear(self, target: Target) -> bool:
        """Forget the object's error: all actions succeeded, or the object is gone. Return whether there was one."""
        return self._known.pop(target, None) is not None

    def is_refused(self, target: Target) -> bool:
        """Return whether the API server refused the object's last action."""
        known = self._known.get(target)
        return known is not None and isinstance(known.error, Invalid | Forbidden)

    def reportable(self, target: Target, now: float) -> tuple[Reason, str] | None:
        """Return reason and message of the object's error for its status.

        None if there is no error, or a transient one that has not lasted `LASTING_S`.
        """
        known = self._known.get(target)
        if known is None or not (is_refusal(known.error) or now - known.since >= LASTING_S):
            return None
        of_bus = isinstance(known.error, BusRefused | BusUnavailable)
        return Reason.BUS_UNAVAILABLE if of_bus else Reason.POD_REFUSED, str(known.error)


def is_refusal(error: MarlaasError) -> bool:
    """Return whether a retry would be refused again."""
    return isinstance(error, Invalid | Forbidden | BusRefused)


def is_transient(error: MarlaasError) -> bool:
    """Return whether the error is transient and says nothing about the object: observe again, or wait."""
    return isinstance(error, Conflict | Stale | TooMany | NoAnswer)
