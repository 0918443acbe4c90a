"""What the clients of the bus fake share: streams, listeners, a clock, and who is waiting."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count

from marlaas_api.bus import BusRefused, Request
from marlaas_api.bus_memory.stream import MemoryStream, matches

# What every call of a client begins with: others run, then it raises if the call may not go on.
Gate = Callable[[], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Listener:
    """Who hears a subject."""

    subject: str
    queue: str
    arrivals: asyncio.Queue[Request] = field(default_factory=asyncio.Queue)


class SharedServer:
    """What the clients share."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._available = True
        self.streams: dict[str, MemoryStream] = {}
        self.listeners: list[Listener] = []
        self._waiters: set[asyncio.Future[None]] = set()
        self._inboxes = count(1)

    @property
    def available(self) -> bool:
        """False is an outage: calls raise BusUnavailable, fetches find nothing, watches begin again afterwards."""
        return self._available

    @available.setter
    def available(self, available: bool) -> None:
        self._available = available
        self.wake()

    def wake(self) -> None:
        """Let everybody who waits look again: something was written, or the clock was moved."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def change(self, timeout_s: float | None, due: float | None) -> None:
        """Wait for a wake, at most `timeout_s` and not past the clock's `due`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        limits = [timeout_s] if timeout_s is not None else []
        limits += [max(due - self.clock(), 0.001)] if due is not None else []
        try:
            async with asyncio.timeout(min(limits, default=None)):
                await waiter
        except TimeoutError:
            return
        finally:
            self._waiters.discard(waiter)

    def stream(self, name: str) -> MemoryStream:
        """A stream as of now. Raises BusRefused."""
        if name not in self.streams:
            raise BusRefused(f"no stream {name}: was it created by `ensure`?")
        self.streams[name].expire(self.clock())
        return self.streams[name]

    def stream_of(self, subject: str) -> MemoryStream | None:
        """The stream that stores a subject."""
        for name, stream in self.streams.items():
            if any(matches(pattern, subject) for pattern in stream.spec.subjects):
                return self.stream(name)
        return None

    def broadcast(self, request: Request) -> None:
        """To every listener of the subject; of a queue to one, in turn."""
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
        """A subject nobody else listens to."""
        return f"_INBOX.{next(self._inboxes)}"
