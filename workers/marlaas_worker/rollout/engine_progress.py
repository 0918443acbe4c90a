"""Counters of an engine's work, and the check whether it makes progress.

vLLM's processes keep the counters in a page of memory that they share with the role. So the role can read them at any time,
also while a long step keeps the engine from answering calls. Does not import vllm; the caller passes the clock, in seconds.
"""

import mmap
import os
from dataclasses import astuple, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

COUNTERS = "MARLAAS_ENGINE_COUNTERS"
"""Environment variable of vLLM's processes: path of the file that they map for their counters."""
STALL_S = 60.0
"""Seconds without progress after which an engine with pending calls counts as hung although it answers calls.

An engine answers only between two steps, so a long step does not explain the lack of progress.
"""
MIN_BUSY_BOUND_S = 120.0
CPU_PRODUCTS_PER_S, GPU_PRODUCTS_PER_S = 1e9, 1e12
"""Multiplications per second of the slowest engine: about a thirtieth of what one core and an old GPU do."""
MIN_CPU_SHARE = 0.05
"""Share of one core's time. The processes of an engine that computes use more; those of one that hangs idle use less."""


class Cell(IntEnum):
    """Position of a counter in the shared memory, in the order of `EngineCounts`. Each has one writer."""

    STEPS = 0
    TOKENS = 1
    LAYERS = 2
    PREEMPTIONS = 3
    QUEUED_STEPS = 4
    QUEUED = 5
    REQUESTS = 6


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Counts of an engine's work so far.

    Attributes:
        steps: batches that were computed.
        tokens: prompt and output tokens that were put into batches.
        layers: layers with adapters that were computed; counted on a CPU only, where one batch may take minutes.
        preemptions: how often a request was removed from the KV cache to make room for others, to be computed again.
        queued_steps: batches beside which requests waited in the engine's own queue.
        queued: requests in that queue at the last batch.
        requests: requests that the engine received.
    """

    steps: int = 0
    tokens: int = 0
    layers: int = 0
    preemptions: int = 0
    queued_steps: int = 0
    queued: int = 0
    requests: int = 0

    @property
    def work(self) -> tuple[int, int, int]:
        """The counters that move if and only if the engine computes for its requests."""
        return self.steps, self.tokens, self.layers

    def __str__(self) -> str:
        """Return the counts of preempted requests and of full batches as a sentence. `RequestLimiter` should keep both at 0."""
        preempted = f"the engine preempted {self.preemptions} of {self.requests} requests"
        return f"{preempted}; {self.queued_steps} of {self.steps} batches had no room for all requests"

    def after(self, earlier: "EngineCounts") -> "EngineCounts":
        """Return these counts plus `earlier`, the totals of the previous incarnations of the engine. `queued` is a current number: not summed."""
        totals = (ours + theirs for ours, theirs in zip(astuple(self), astuple(earlier), strict=True))
        return replace(EngineCounts(*totals), queued=self.queued)


class EngineCounters:
    """Counters of an engine in memory.

    memory: a page of shared memory, or a process's own bytes. cells: its int64 values, indexed by `Cell`; one access reads or writes a value.
    """

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self.cells = memoryview(memory).cast("q")

    def read(self) -> EngineCounts:
        """Return the current values of all counters."""
        return EngineCounts(*self.cells[: len(Cell)])


def create_counters(path: Path) -> EngineCounters:
    """Create the file of a new incarnation's counters, in place of the previous one's."""
    path.unlink(missing_ok=True)
    path.write_bytes(bytes(mmap.PAGESIZE))
    return _map(path)


def attach_counters() -> EngineCounters:
    """Return the counters of the incarnation to which this process belongs (`COUNTERS`); if it belongs to none, counters of its own."""
    path = os.environ.get(COUNTERS)
    return _map(Path(path)) if path else EngineCounters(bytearray(mmap.PAGESIZE))


def _map(path: Path) -> EngineCounters:
    with path.open("r+b") as file:
        return EngineCounters(mmap.mmap(file.fileno(), mmap.PAGESIZE))


class CountsWork:
    """Mixin for vLLM's scheduler classes. Counts their requests and batches; arguments and results are those of vLLM's methods."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cells = attach_counters().cells

    def add_request(self, request: Any) -> None:
        """Count a request, and add it to the queue as vLLM does."""
        self._cells[Cell.REQUESTS] += 1
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Return the next batch, as vLLM does, and count its tokens, its preemptions, and the requests that remain queued."""
        batch = super().schedule(*arguments, **options)  # type: ignore[misc]
        cells, queued = self._cells, self.get_request_counts()[1]  # type: ignore[attr-defined]
        cells[Cell.TOKENS] += batch.total_num_scheduled_tokens
        cells[Cell.PREEMPTIONS] += len(batch.preempted_req_ids or ())
        cells[Cell.QUEUED_STEPS] += queued > 0
        cells[Cell.QUEUED] = queued
        return batch

    def update_from_output(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        """Count a batch that was computed, unless it is empty, and process its output as vLLM does. batch: vLLM's SchedulerOutput."""
        self._cells[Cell.STEPS] += batch.total_num_scheduled_tokens > 0
        return super().update_from_output(batch, *arguments, **options)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Standstill:
    """How long an engine has done nothing, in seconds.

    Attributes:
        still_s: since the latest time at which its counters moved or it had nothing to do.
        quiet_s: since the latest time at which its counters moved, it had nothing to do, or its processes used the CPU.
    """

    still_s: float
    quiet_s: float


@dataclass(slots=True)
class ProgressWatch:
    """Watches whether an engine that has something to do makes progress: whether its counters move.

    CPU time does not prove progress, because a process that waits in a loop uses it too. But the counters stand still while a step (on a
    CPU, a layer) is computed, so the user of this class accepts CPU time instead, for at most `busy_bound_s`.

    busy_bound_s: most seconds that a healthy engine computes without a move of its counters.
    """

    busy_bound_s: float = MIN_BUSY_BOUND_S
    _work: tuple[int, ...] = ()
    _cpu_s: float = 0.0
    _moved_at: float = 0.0
    _computed_at: float = 0.0

    def look(self, has_work: bool, counts: EngineCounts, cpu_s: float, now: float) -> Standstill:
        """Compare the engine's state with the one at the last call, and return for how long the engine has stood still.

        Args:
            has_work: whether the engine has something to do.
            counts: its current counts.
            cpu_s: CPU time of its processes so far, in seconds.
        """
        if counts.work != self._work or not has_work:
            self._work, self._cpu_s = counts.work, cpu_s
            self._moved_at = self._computed_at = now
        elif cpu_s - self._cpu_s >= MIN_CPU_SHARE * (now - self._computed_at):
            self._cpu_s, self._computed_at = cpu_s, now
        return Standstill(now - self._moved_at, now - self._computed_at)


def busy_bound_s(batch_tokens: int, products_per_token: int, products_per_s: float) -> float:
    """Return for how many seconds an engine may compute without a move of its counters; see `ProgressWatch`.

    Args:
        batch_tokens: tokens of the largest batch.
        products_per_token: multiplications per token between two changes of the counters.
        products_per_s: multiplications per second of the slowest engine.
    """
    return max(MIN_BUSY_BOUND_S, batch_tokens * products_per_token / products_per_s)
