"""The one thread that uses torch; agents take turns on it, one micro-batch each.

All of the trainer's work on the device runs here, so this module also separates errors of the device from errors of a
job (`device_errors`).

Computation is bitwise reproducible on any number of threads, which strict mode promises and libraries do not provide by default. MKL may change
its order of summation unless configured (`process_setup`). Some CUDA kernels add in the order in which threads arrive. TF32 rounds the
factors of a float32 product to 10 bits; it is off, as in vLLM, unless vLLM's own variable allows it.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from marlaas_worker.device_errors import DeviceLost, OutOfMemory, first_line, is_out_of_memory, says_lost
from marlaas_worker.process_setup import ask_for_the_same_bits


def compute_reproducibly(device: torch.device) -> None:
    """Configure this process and thread before the first computation, since MKL reads its settings once.

    Keeps values that the user has set.
    """
    ask_for_the_same_bits()
    torch.set_num_threads(torch.get_num_threads())  # an explicit number stops MKL from choosing another
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision(os.environ.get("VLLM_FLOAT32_MATMUL_PRECISION", "highest"))


T = TypeVar("T")


class Compute:
    """A dedicated compute thread with a first-in-first-out queue, so that agents with work alternate.

    busy_s, busy_s_by_account: seconds of work so far, in total and by account.
    lost: text of the error that made the device unusable for this process; empty while it works.
    The event loop stays free and keeps leases alive, however long a pass takes.
    """

    def __init__(self, num_threads: int) -> None:
        self.lost = ""
        self.busy_s = 0.0
        self.busy_s_by_account: dict[str, float] = {}
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(
            1, "trainer-compute", initializer=torch.set_num_threads, initargs=(num_threads,)
        )

    async def run(self, work: Callable[[], T], account: str = "") -> T:
        """Run `work` on the thread. Cancellation waits until the work has ended, because torch cannot be interrupted.

        Raises:
            OutOfMemory: the device has no memory for the work.
            DeviceLost: the device is unusable, now or since earlier work; the work was not completed.
        """
        async with self._turn:
            started = time.perf_counter()
            future = asyncio.get_running_loop().run_in_executor(self._thread, self._attempt, work)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                await _ended(future)
                future.exception()  # mark it as retrieved: the caller is cancelled
                raise
            finally:
                self._charge(account, time.perf_counter() - started)

    def close(self) -> None:
        """End the thread after its current work."""
        self._thread.shutdown(wait=True)

    def _attempt(self, work: Callable[[], T]) -> T:
        if self.lost:
            raise self._lost_error()
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise OutOfMemory(first_line(error)) from error
            if not (says_lost(str(error)) or _is_lost()):
                raise
            self.lost = first_line(error)
            raise self._lost_error() from error

    def _lost_error(self) -> DeviceLost:
        return DeviceLost(
            f"the trainer's device is lost ({self.lost}); the process exits and restarts from the last commits"
        )

    def _charge(self, account: str, seconds: float) -> None:
        self.busy_s += seconds
        if account:
            self.busy_s_by_account[account] = self.busy_s_by_account.get(account, 0.0) + seconds


def _is_lost() -> bool:
    """Return whether the CUDA context is unusable: after a sticky error every call fails, whatever the first error's text was."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


async def _ended(future: asyncio.Future[T]) -> None:
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
