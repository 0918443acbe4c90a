"""State that the clients of the bus fake share: streams, listeners, a clock, and waiting calls."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count

from marlaas_api.bus import BusRefused, Request
from marlaas_api.bus_memory.stream import MemoryStream, matches

# Called at the start of every client call: yields to other tasks, then raises if the call is not possible.
Gate = Callable[[], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Listener:
    """A subscription to a subject."""

    subject: str
    queue: str
    arrivals: asyncio.Queue[Request] = field(default_factory=asyncio.Queue)


class SharedServer:
    """The server state that the clients share."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._available = True
        self.streams: dict[str, MemoryStream] = {}
        self.listeners: list[Listener] = []
        self._waiters: dict[asyncio.Future[None], str | None] = {}
        self._inboxes = count(1)

    @property
    def available(self) -> bool:
        """False simulates an outage: calls raise BusUnavailable, fetches return no messages, and watches start again afterwards."""
        return self._available

    @available.setter
    def available(self, available: bool) -> None:
        self._available = available
        self.wake()

    def wake(self, stream: str | None = None) -> None:
        """Wake the calls that wait for a stream, because it was changed; all waiting calls without one, because the clock was moved."""
        for waiter, awaited in self._waiters.items():
            if not waiter.done() and (stream is None or awaited in (None, stream)):
                waiter.set_result(None)

    async def change(self, timeout_s: float | None, due: float | None, stream: str | None = None) -> None:
        """Wait for `wake`, for at most `timeout_s` (real time) and at most until the clock's `due`. stream: None waits for all streams."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = stream
        limits = [timeout_s] if timeout_s is not None else []
        limits += [max(due - self.clock(), 0.001)] if due is not None else []
        try:
            async with asyncio.timeout(min(limits, default=None)):
                await waiter
        except TimeoutError:
            return
        finally:
            del self._waiters[waiter]

    def stream(self, name: str) -> MemoryStream:
        """Return a stream after expiring its old messages. Raises BusRefused."""
        if name not in self.streams:
            raise BusRefused(f"no stream {name}: was it created by `ensure`?")
        self.streams[name].expire(self.clock())
        return self.streams[name]

    def stream_of(self, subject: str) -> MemoryStream | None:
        """Return the stream that stores a subject; None if there is none."""
        for name, stream in self.streams.items():
            if any(matches(pattern, subject) for pattern in stream.spec.subjects):
                return self.stream(name)
        return None

    def broadcast(self, request: Request) -> None:
        """Deliver to every listener of the subject, and to one member of each queue group, in turn."""
        served: set[tuple[str, str]] = set()
        for listener in list(self.listeners):
            group = (listener.subject, listener.queue)
            if not matches(listener.subject, request.subject) or (listener.queue and group in served):
                continue
            listener.arrivals.put_nowait(request)
            if listener.queue:
                served.add(group)
                self.listeners.remove(listener)
                self.listeners.append(listener)

    def inbox(self) -> str:
        """Return a subject that has no other listener."""
        return f"_INBOX.{next(self._inboxes)}"
