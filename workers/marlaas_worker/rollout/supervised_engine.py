"""The engine as the role uses it: supervised (`SupervisedEngine`), and limited (`RequestLimiter`).

A supervised engine is an engine that is restarted after each failure (an exit or a hang), and tested at each start. From
the failure until the next incarnation serves, its calls raise EngineDown. Adapters and slots are lost with an incarnation.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Iterator
from itertools import count
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from marlaas_api.errors import MarlaasError
from marlaas_worker.fair_queue import FairQueue, Ticket
from marlaas_worker.rollout.accounts import Account, OpenEpisodes
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
from marlaas_worker.rollout.engine_meter import EngineMeter
from marlaas_worker.rollout.kv_budget import KvBudget, Place, RecentOutputs
from marlaas_worker.rollout.self_test import SelfTestFailed

HEALTH_CHECK_S = 5.0
RESTART_BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
_log = logging.getLogger(__name__)

T = TypeVar("T")


class RequestLimiter:
    """Requests in the engine: as many as its batch and its KV cache hold. Room goes to tenants by weight, then to jobs, then to agents.

    The engine's own queue is first come, first served. Costs are tokens: prompt tokens outside the engine's prefix
    cache, and generated tokens. A request that does not fit may be passed by others, for at most one KV cache of tokens.
    The credit of all tenants is also one KV cache of tokens: a tenant whose episodes have all waited for tools may then fill its
    share of the batch at once.

    Attributes:
        episodes: the open ones, for which tenants keep their credit.
    """

    def __init__(self, max_seqs: int, clock: Callable[[], float] = time.monotonic, kv_tokens: int = 0) -> None:
        self.budget = KvBudget(max_seqs, kv_tokens)
        self.outputs = RecentOutputs()
        self.episodes = OpenEpisodes()
        self._clock = clock
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self.set_kv_tokens(kv_tokens)
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._lone = asyncio.Lock()
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the queue."""
        return len(self._queue)

    def set_kv_tokens(self, kv_tokens: int) -> None:
        """Set the size of the engine's KV cache in tokens, after an engine start. 0: unknown."""
        self.budget.set_kv_tokens(kv_tokens)
        self._queue.max_passed = self._queue.max_credit = self.budget.kv_tokens

    def usage(self, tenant: str) -> float:
        """Return the tokens that a tenant has used, divided by its weight; of an idle tenant, what it would begin with."""
        return self._queue.usage(tenant)

    def charge(self, tenant: str, num_tokens: float) -> None:
        """Add what a tenant has used on another replica. It counts if the tenant has open episodes here."""
        self._queue.charge((tenant,), num_tokens)

    @contextlib.contextmanager
    def request(self, account: Account, episode: str) -> Iterator[None]:
        """Count a request's episode as open while the context is open, whatever the request waits for, and for a while after."""
        self.close_old_episodes()
        if self.episodes.begin(account, episode):
            self._queue.open(account.path, account.weight)
        try:
            yield
        finally:
            self.episodes.end(account, episode, self._clock())

    @contextlib.asynccontextmanager
    async def place(self, account: Account, estimate: float, kv_tokens: int = 0) -> AsyncIterator[Place]:
        """Wait for a place, and hold it while the context is open. Its `cost` then replaces the estimate, in tokens.

        kv_tokens: expected length of the request's context at its end.
        """
        granted = asyncio.get_running_loop().create_future()
        size = self.budget.size(kv_tokens)
        ticket = self._queue.push(account.path, granted, cost=estimate, size=size, weight=account.weight)
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

    @contextlib.asynccontextmanager
    async def alone(self, account: Account) -> AsyncIterator[Place]:
        """Wait until no request is in the engine, and admit none while the context is open. Its cost is charged at the end."""
        async with self._lone:
            self._is_closed = True
            place = Place()
            try:
                await self._empty.wait()
                yield place
            finally:
                self._is_closed = False
                self._queue.charge(account.path, place.cost)
                self._grant()

    def _grant(self) -> None:
        while not self._is_closed and (room := self.budget.room) >= 0 and (ticket := self._queue.pop(room)) is not None:
            if ticket.item.cancelled():
                self._queue.settle(ticket, 0.0)
            else:
                self.budget.take(ticket.size)
                self._num_inside += 1
                self._empty.clear()
                ticket.item.set_result(None)

    def _end(self, ticket: Ticket[asyncio.Future[None]], cost: float) -> None:
        self._queue.settle(ticket, cost)
        self.budget.give_back(ticket.size)
        self._num_inside -= 1
        if not self._num_inside:
            self._empty.set()
        self._grant()

    def close_old_episodes(self) -> None:
        """Close the episodes whose last request ended too long ago (`accounts.OPEN_S`)."""
        for path in self.episodes.expired(self._clock()):
            self._queue.close(path)


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
        await self._admit()

    async def restart(self) -> None:
        await self._engine.restart()
        await self._admit()

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

    def forget(self, uids: Collection[str], tenants: Container[str]) -> None:
        """Drop the totals and estimates of jobs that are gone, and of all tenants but these."""
        self.limiter.close_old_episodes()
        self.meter.forget(uids, tenants)
        for uid in uids:
            self.limiter.outputs.forget(uid)

    async def supervise(self) -> None:
        """Check the engine's health and restart it, until cancelled. Raises the engine's error if all restarts fail."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check(), name="engine health")
            group.create_task(self._restart_after_failures(), name="engine restart")

    async def _admit(self) -> None:
        """Test a new incarnation, and let requests use it."""
        await self._test(self._engine)
        self.limiter.set_kv_tokens(self._engine.limits.kv_tokens)
        self.up = True

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
