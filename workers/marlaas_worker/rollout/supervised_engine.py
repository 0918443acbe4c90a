"""The engine as the role uses it: supervised (`SupervisedEngine`), limited (`RequestLimiter`), metered (`EngineMeter`).

A supervised engine is an engine: failures are detected, it is restarted once per failure, every incarnation
is tested. Its calls raise EngineDown from the failure (an exit or a hang) until the next incarnation serves. The
adapters and slots of an earlier incarnation are gone; callers detect that by comparing `incarnation`.
"""

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from marlaas_api.errors import MarlaasError
from marlaas_worker.rollout.engine import (
    Began,
    Completion,
    Engine,
    EngineDown,
    EngineLimits,
    LoadedAdapter,
    Sampling,
    unheard,
)
from marlaas_worker.rollout.self_test import SelfTestFailed

HEALTH_CHECK_S = 5.0
RESTART_BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
_log = logging.getLogger(__name__)

T = TypeVar("T")


class Rotation(Generic[T]):
    """One queue per job, served round-robin, one item at a time. A fair scheduler can replace it."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def push(self, job: str, item: T) -> None:
        """Append to the job's queue; a new queue joins at the end of the rotation."""
        self._queues.setdefault(job, deque()).append(item)

    def pop(self) -> T | None:
        """Remove and return the next item, and move its job to the end of the rotation; None if there is none."""
        if not self._queues:
            return None
        job, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[job] = queue
        return item

    def remove(self, job: str, item: T) -> None:
        """Remove an item that still waits; does nothing if it does not wait."""
        queue = self._queues.get(job, deque())
        with contextlib.suppress(ValueError):
            queue.remove(item)
        if not queue:
            self._queues.pop(job, None)


class RequestLimiter:
    """At most `capacity` requests in the engine at a time; the others wait in one queue per job.

    The engine's own queue is first come, first served, so one job's requests could delay all other jobs.
    """

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._waiting: Rotation[asyncio.Future[None]] = Rotation()

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the queues."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def place(self, job: str) -> AsyncIterator[None]:
        """Hold one place while the context is open. Waits for it in the job's queue."""
        await self._take(job)
        try:
            yield
        finally:
            self._release()

    async def _take(self, job: str) -> None:
        if self._free and not len(self._waiting):
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.push(job, place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._release()
            else:
                self._waiting.remove(job, place)
            raise

    def _release(self) -> None:
        while (place := self._waiting.pop()) is not None:
            if not place.done():
                place.set_result(None)
                return
        self._free += 1


@dataclass(slots=True)
class EngineMeter:
    """Engine time and generated tokens since the role's start, by job uid. The caller passes the clock, in seconds.

    busy_s: seconds with a non-empty batch. While n requests are in the engine, each is charged 1/n of the time, so
    the shares of all jobs add up to it.
    """

    busy_s: float = 0.0
    num_running: int = 0
    job_tokens: Counter[str] = field(default_factory=Counter)
    job_engine_s: dict[str, float] = field(default_factory=dict)
    _share_s: float = 0.0
    _at: float = 0.0  # Only used while a request runs; the first `enter` sets it.

    def enter(self, now: float) -> float:
        """Note that a request enters the engine; return the mark to pass to `leave`."""
        self.advance(now)
        self.num_running += 1
        return self._share_s

    def leave(self, mark: float, uid: str, now: float) -> None:
        """Note that a request left the engine, and charge its share of the time to its job."""
        self.advance(now)
        self.num_running -= 1
        self.job_engine_s[uid] = self.job_engine_s.get(uid, 0.0) + self._share_s - mark

    def advance(self, now: float) -> None:
        """Update the totals to `now`."""
        if self.num_running:
            self.busy_s += now - self._at
            self._share_s += (now - self._at) / self.num_running
        self._at = now


class SupervisedEngine:
    """An `engine.Engine` that is tested at each start and restarted after a failure.

    Args:
        test: must pass before an incarnation serves.
        engine_stopped: called with the reason after each failure.
        engine_restarted: called after each restart.

    Attributes:
        limiter, meter: of the requests to this engine.
        slot_numbers: for every adapter that is ever loaded into this engine.
        incarnation: from 0; incremented at each failure.
        restarts: successful restarts after a failure.
    """

    def __init__(
        self,
        engine: Engine,
        test: Callable[[Engine], Awaitable[None]],
        engine_stopped: Callable[[str], None],
        engine_restarted: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._test = test
        self._on_stopped = engine_stopped
        self._on_restarted = engine_restarted
        self._down = asyncio.Event()
        self.limiter = RequestLimiter(engine.limits.max_num_seqs)
        self.meter = EngineMeter()
        self.slot_numbers: Iterator[int] = count(1)
        self.up = False
        self.incarnation = 0
        self.restarts = 0

    @property
    def base(self) -> str:
        return self._engine.base

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    async def start(self) -> None:
        await self._engine.start()
        await self._test(self._engine)
        self.up = True

    async def restart(self) -> None:
        await self._engine.restart()
        await self._test(self._engine)
        self.up = True

    async def stop(self) -> None:
        self.up = False
        await self._engine.stop()

    async def load(self, adapter: LoadedAdapter) -> None:
        await self._call(self._engine.load(adapter))

    async def unload(self, adapter: LoadedAdapter) -> None:
        await self._call(self._engine.unload(adapter))

    async def digest(self, adapter: LoadedAdapter) -> str:
        return await self._call(self._engine.digest(adapter))

    async def score(self, adapter: LoadedAdapter, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        return await self._call(self._engine.score(adapter, ids))

    async def generate(
        self,
        request: str,
        adapter: LoadedAdapter,
        prompt_ids: npt.NDArray[np.int32],
        sampling: Sampling,
        began: Began = unheard,
    ) -> Completion:
        return await self._call(self._engine.generate(request, adapter, prompt_ids, sampling, began))

    async def healthy(self) -> bool:
        return self.up and await self._engine.healthy()

    def report(self, incarnation: int, reason: str) -> None:
        """Report that an incarnation has failed. A report about an earlier incarnation is ignored."""
        if incarnation != self.incarnation or not self.up:
            return
        _log.error("the engine failed and is restarted: %s", reason)
        self.up = False
        self.incarnation += 1
        self._on_stopped(reason)
        self._down.set()

    async def supervise(self) -> None:
        """Check the engine's health and restart it, until cancelled. Raises the engine's error if all restarts fail."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check(), name="engine health")
            group.create_task(self._restart_after_failures(), name="engine restart")

    async def _call(self, work: Awaitable[T]) -> T:
        incarnation = self.incarnation
        try:
            return await work
        except EngineDown as error:
            self.report(incarnation, str(error))
            raise

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_CHECK_S)
            incarnation = self.incarnation
            if self.up and not await self._engine.healthy():
                self.report(incarnation, "it does not answer its health check")

    async def _restart_after_failures(self) -> None:
        while True:
            await self._down.wait()
            self._down.clear()
            await self._restart_with_backoff()
            self.restarts += 1
            self._on_restarted()

    async def _restart_with_backoff(self) -> None:
        for attempt, wait_s in enumerate(RESTART_BACKOFF_S, start=1):
            await asyncio.sleep(wait_s)
            try:
                await self.restart()
            except SelfTestFailed:
                raise  # The same engine on the same machine would fail again.
            except MarlaasError:
                _log.exception("engine restart %d of %d failed", attempt, len(RESTART_BACKOFF_S))
                if attempt == len(RESTART_BACKOFF_S):
                    raise
            else:
                return
