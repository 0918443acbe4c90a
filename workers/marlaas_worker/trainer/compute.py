"""The one thread that uses torch; agents take turns on it, in the order of `Compute.queue`.

All of the trainer's work on the device runs here, so this module also separates errors of the device from errors of a
job (`devices`).

Computation is bitwise reproducible on any number of threads, which strict mode promises and libraries do not provide by default:

- MKL may change its order of summation unless configured (`process_setup`).
- Some CUDA kernels add in the order in which threads arrive, such as the backward pass of fused attention. A job with
  `training.deterministic` forbids them: torch then takes kernels of a fixed order, or raises an error if an operation has none.
- cuBLAS may choose another kernel for each stream, unless it has a fixed workspace.

For products in 16 bits, cuBLAS may round partial sums to 16 bits before it adds them; that is off. TF32 rounds the factors of a float32
product to 10 bits; it is off, as in vLLM, unless VLLM_FLOAT32_MATMUL_PRECISION allows it.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from marlaas_api.errors import Permanent
from marlaas_worker.devices import DeviceLost, OutOfMemory, first_line, is_out_of_memory, says_lost
from marlaas_worker.fair_queue import Ticket
from marlaas_worker.process_setup import ask_for_the_same_bits
from marlaas_worker.trainer.compute_queue import QUANTUM_S, ComputeAccount, ComputeQueue


def compute_reproducibly(device: torch.device) -> None:
    """Configure this process and thread before the first computation, since MKL and cuBLAS read their settings once.

    Keeps environment variables that the user has set. Deterministic kernels are the choice of each job: see `deterministic`.
    """
    ask_for_the_same_bits()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing here reads fresh memory
    torch.set_num_threads(torch.get_num_threads())  # an explicit number stops MKL from choosing another
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.set_float32_matmul_precision(os.environ.get("VLLM_FLOAT32_MATMUL_PRECISION", "highest"))


class NoDeterministicKernel(Permanent):
    """The model needs an operation that has no deterministic kernel on this device, and the job allows no other."""


@contextlib.contextmanager
def deterministic(is_on: bool) -> Iterator[None]:
    """Within the context, let torch use deterministic kernels only (`is_on`), or the fastest ones.

    The setting is of the whole process, so it covers backward passes on autograd's threads. Changing it takes microseconds.

    Raises:
        NoDeterministicKernel: an operation has none.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_on)
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        text = f"{first_line(error)}; set training.deterministic to false in a new job, whose results then differ a little each time"
        raise NoDeterministicKernel(text) from error
    finally:
        torch.use_deterministic_algorithms(before)


T = TypeVar("T")

Work = Ticket[tuple[ComputeAccount, int, asyncio.Future[None]]]
NOBODY = ComputeAccount()
"""The account of work that is done for no job: loading and calibrating the model."""


class Compute:
    """Runs all agents' work on one thread, in the order of a fair queue.

    The event loop stays free and keeps leases alive, however long a pass takes.

    Args:
        num_threads: number of threads that torch uses within one piece of work (`torch.set_num_threads`).
        quantum_s: seconds for which one agent keeps its turn while it has more work.

    Attributes:
        queue: the waiting work, in its order.
        busy_s: seconds of work so far, of all accounts.
        lost: text of the error that made the device unusable for this process; empty while it works.
    """

    def __init__(self, num_threads: int, quantum_s: float = QUANTUM_S) -> None:
        self.lost = ""
        self.busy_s = 0.0
        self.queue: ComputeQueue[asyncio.Future[None]] = ComputeQueue(quantum_s)
        self._is_busy = False
        self._thread = ThreadPoolExecutor(
            1, "trainer-compute", initializer=torch.set_num_threads, initargs=(num_threads,)
        )

    async def run(self, work: Callable[[], T], account: ComputeAccount = NOBODY, num_tokens: int = 0) -> T:
        """Run `work` on the thread. Cancellation waits until the work has ended, because torch cannot be interrupted.

        account: charged with the seconds. num_tokens: padded tokens of a micro-batch, from which its time is estimated; 0 for other work.

        Raises:
            OutOfMemory: the device has no memory for the work.
            DeviceLost: the device is unusable, now or since earlier work; the work was not completed.
        """
        loop = asyncio.get_running_loop()
        ticket = self.queue.push(account, loop.create_future(), num_tokens)
        self._grant()
        await self._turn(ticket)
        started = time.perf_counter()
        future = loop.run_in_executor(self._thread, self._attempt, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _ended(future)
            future.exception()  # mark it as retrieved: the caller is cancelled
            raise
        finally:
            seconds = time.perf_counter() - started
            self.busy_s += seconds
            account.busy_s += seconds
            self._end(ticket, seconds)

    def close(self) -> None:
        """End the thread after its current work."""
        self._thread.shutdown(wait=True)

    async def _turn(self, ticket: Work) -> None:
        try:
            await ticket.item[2]
        except asyncio.CancelledError:
            if ticket.is_queued:
                self.queue.withdraw(ticket)
            elif not ticket.item[2].cancelled():  # the turn was granted
                self._end(ticket, 0.0)
            raise

    def _end(self, ticket: Work, seconds: float) -> None:
        self.queue.settle(ticket, seconds)
        self._is_busy = False
        # Not at once: the agent that has the turn goes on first, and may queue its next micro-batch.
        asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        while not self._is_busy and (ticket := self.queue.next()) is not None:
            if ticket.item[2].cancelled():  # the task that waited was cancelled, and has not run since
                self.queue.settle(ticket, 0.0)
            else:
                self._is_busy = True
                ticket.item[2].set_result(None)

    def _attempt(self, work: Callable[[], T]) -> T:
        if self.lost:
            raise self._lost_error()
        try:
            result = work()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # the time, and an error, of its kernels belong to this work's account
            return result
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
