"""The engine as the role uses it: restarted after each failure (an exit or a hang), and tested at each start.

From a failure until the next incarnation serves, the engine's calls raise EngineDown. All loaded adapters are lost with
an incarnation.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from marlaas_api.background import background
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
from marlaas_worker.rollout.engine_meter import EngineMeter
from marlaas_worker.rollout.engine_progress import EngineCounts
from marlaas_worker.rollout.request_limiter import RequestLimiter
from marlaas_worker.rollout.self_test import SelfTestFailed

HEALTH_CHECK_S = 5.0
RESTART_BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0)
_log = logging.getLogger(__name__)

T = TypeVar("T")


class SupervisedEngine:
    """An `engine.Engine` that is tested at each start and restarted after a failure.

    Args:
        engine: the engine to supervise, not started yet.
        test: called with the engine at each start; if the test raises, the incarnation does not serve.
        engine_stopped: called after each failure, with its reason.
        engine_restarted: called after each successful restart.

    Attributes:
        limiter: limits the requests in the engine; the same for all incarnations.
        meter: counts the requests' engine time and tokens; the same for all incarnations.
        slot_numbers: source of `LoadedAdapter.slot_id` for every load into this engine.
        up: whether the engine serves.
        incarnation: number of the current incarnation, from 0; each failure adds 1.
        restarts: number of successful restarts.
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

    @property
    def counts(self) -> EngineCounts:
        return self._engine.counts

    async def start(self) -> None:
        await self._engine.start()
        await self._admit()

    async def restart(self) -> None:
        await self._engine.restart()
        await self._admit()

    async def stop(self) -> None:
        self.up = False
        await self._engine.stop()

    async def load(self, adapter: LoadedAdapter) -> str:
        return await self._call(self._engine.load(adapter))

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
        """Report that an incarnation has failed, so that the engine is restarted. Ignored for an earlier incarnation, or if the engine is down.

        incarnation: the value of `incarnation` before the call that failed. reason: for the log, and for `engine_stopped`.
        """
        if incarnation != self.incarnation or not self.up:
            return
        _log.error("the engine failed and is restarted: %s", reason)
        self.up = False
        self.incarnation += 1
        self._on_stopped(reason)
        self._down.set()

    async def supervise(self) -> None:
        """Check the engine's health, and restart it after each failure, until cancelled.

        Raises the engine's error if all attempts to restart it fail, and SelfTestFailed at once if a restarted engine fails its test.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check(), name="engine health")
            group.create_task(self._restart_after_failures(), name="engine restart")

    async def _admit(self) -> None:
        """Test a new incarnation, set the limiter to the sizes of its KV cache and of its steps, and let requests use it."""
        async with background(self._check_tested()):
            await self._test(self._engine)
        self.limiter.set_kv_tokens(self._engine.limits.kv_tokens)
        self.limiter.prefill.step_tokens = self._engine.limits.step_tokens
        self.up = True

    async def _check_tested(self) -> None:
        """Check the engine's health while it is tested. A failed check makes the pending calls of the test raise EngineDown."""
        is_healthy = True
        while is_healthy:
            await asyncio.sleep(HEALTH_CHECK_S)
            is_healthy = await self._engine.healthy()

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
