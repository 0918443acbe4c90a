"""Limiter for requests in the engine; the others wait in one queue per job, served round-robin.

The engine's own queue is first come, first served, so one job's requests could delay all other jobs. `Rotation`
chooses the next request; a fair scheduler can replace it.
"""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Rotation(Generic[T]):
    """One queue per job, served round-robin, one item at a time."""

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
    """At most `capacity` holders at a time."""

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
            self._pass_on()

    async def _take(self, job: str) -> None:
        if self._free and not len(self._waiting):
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.push(job, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            else:
                self._waiting.remove(job, turn)
            raise

    def _pass_on(self) -> None:
        while (turn := self._waiting.pop()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
