"""The engine as the role uses it: supervised (`SupervisedEngine`), limited (`RequestLimiter`), metered (`EngineMeter`).

A supervised engine is an engine that is restarted after each failure (an exit or a hang), and tested at each start. From
the failure until the next incarnation serves, its calls raise EngineDown. Adapters and slots are lost with an incarnation.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from marlaas_api.errors import MarlaasError
from marlaas_worker.fair_queue import FairQueue, Ticket
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
OPEN_S = 60.0  # as long as a request is kept without news of its sandbox
RECENT, MAX_JOBS = 64, 4096  # outputs per job, and jobs, that estimates remember
RESTART_BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Account:
    """Tenant and job that a request is charged to. weight: the tenant's share relative to other tenants."""

    tenant: str
    weight: float
    job: str


@dataclass(slots=True, eq=False)
class Place:
    """A place in the engine. cost: real cost of the request in tokens, set by its holder; 0 until then."""

    cost: float = 0.0


class RequestLimiter:
    """At most `capacity` requests in the engine at a time. Places go to tenants by weight, and within a tenant to jobs.

    The engine's own queue is first come, first served. Costs are tokens: prompt tokens outside the engine's prefix
    cache, and generated tokens. An episode counts as open until `OPEN_S` after its last request; its end is not seen.
    """

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = capacity
        self._clock = clock
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._open: OrderedDict[str, tuple[Account, float]] = OrderedDict()
        self._recent: OrderedDict[str, deque[int]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the queue."""
        return len(self._queue)

    def usage(self, tenant: str) -> float:
        """Return the tokens that a tenant has used, divided by its weight; 0 if it is not active."""
        return self._queue.usage(tenant)

    def expected_tokens(self, job: str, max_tokens: int) -> int:
        """Return the 90th percentile of the job's recent outputs in tokens, at most `max_tokens`."""
        recent = sorted(self._recent.get(job, ())) or [max_tokens]
        return min(recent[9 * len(recent) // 10], max_tokens)

    def note_tokens(self, job: str, num_tokens: int) -> None:
        """Record a request's number of generated tokens, for later estimates."""
        self._recent.setdefault(job, deque(maxlen=RECENT)).append(num_tokens)
        self._recent.move_to_end(job)
        if len(self._recent) > MAX_JOBS:
            self._recent.popitem(last=False)

    @contextlib.asynccontextmanager
    async def place(self, account: Account, episode: str, estimate: float) -> AsyncIterator[Place]:
        """Wait for a place, and hold it while the context is open. Its `cost` then replaces the estimate, in tokens."""
        self._see(account, episode)
        granted = asyncio.get_running_loop().create_future()
        ticket = self._queue.push(account.tenant, account.job, granted, cost=estimate)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self._queue.remove(ticket)
            else:
                self._end(ticket, 0.0)
            raise
        place = Place()
        try:
            yield place
        finally:
            self._end(ticket, place.cost)

    def _grant(self) -> None:
        while self._free and (ticket := self._queue.pop()) is not None:
            if ticket.item.cancelled():
                self._queue.settle(ticket, 0.0)
            else:
                self._free -= 1
                ticket.item.set_result(None)

    def _end(self, ticket: Ticket[asyncio.Future[None]], cost: float) -> None:
        self._queue.settle(ticket, cost)
        self._free += 1
        self._grant()

    def _see(self, account: Account, episode: str) -> None:
        """Note a request of an episode, and close the episodes whose last request is too long ago."""
        self._queue.set_weight(account.tenant, account.weight)
        if episode not in self._open:
            self._queue.open(account.tenant, account.job)
        self._open[episode] = account, (now := self._clock())
        self._open.move_to_end(episode)
        while self._open and (oldest := next(iter(self._open.values())))[1] < now - OPEN_S:
            self._open.popitem(last=False)
            self._queue.close(oldest[0].tenant, oldest[0].job)


@dataclass(slots=True)
class EngineMeter:
    """Engine time and generated tokens since the role's start, by job uid. The caller passes the clock, in seconds.

    busy_s: seconds with a non-empty batch. Each of n requests in the engine is charged 1/n of the time.
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
        engine_stopped, engine_restarted: called with the reason after each failure, and after each restart.

    Attributes:
        limiter, meter: of the requests to this engine.
        slot_numbers: for every adapter that is ever loaded into this engine.
        incarnation, restarts: number of failures, and of successful restarts.
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
