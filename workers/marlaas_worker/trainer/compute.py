"""The one thread that touches torch; agents take turns on it, one micro-batch each."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Compute:
    """A dedicated thread behind a fair queue: whoever waits longest goes next, so ready agents rotate.

    busy_s: seconds of work so far, in all and by account. The event loop stays free, and keeps leases alive, however long a pass takes.
    """

    def __init__(self, num_threads: int) -> None:
        self.busy_s = 0.0
        self.busy_s_by_account: dict[str, float] = {}
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(
            1, "trainer-compute", initializer=torch.set_num_threads, initargs=(num_threads,)
        )

    async def run(self, work: Callable[[], T], account: str = "") -> T:
        """Run `work` on the thread. Cancelled, however often, it still waits for the thread: torch cannot be stopped half-way."""
        async with self._turn:
            started = time.perf_counter()
            future = asyncio.get_running_loop().run_in_executor(self._thread, work)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                await _ended(future)
                future.exception()  # nobody is left to hear it
                raise
            finally:
                self._charge(account, time.perf_counter() - started)

    def close(self) -> None:
        """End the thread after its current work."""
        self._thread.shutdown(wait=True)

    def _charge(self, account: str, seconds: float) -> None:
        self.busy_s += seconds
        if account:
            self.busy_s_by_account[account] = self.busy_s_by_account.get(account, 0.0) + seconds


async def _ended(future: asyncio.Future[T]) -> None:
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
