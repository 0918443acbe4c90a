"""The fake of the bus seam: JetStream's semantics in one process. It ships with the product; tests of every role use it.

`MemoryServer().connect(name)` returns a client; several clients share one server. Redelivery, deduplication and expiry
follow the server's clock, which a test may replace: after moving it, call `MemoryServer.wake`. Fetch timeouts are in
real time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from marlaas_api.background import background
from marlaas_api.bus import (
    Bucket,
    BusRefused,
    BusUnavailable,
    Consumer,
    Position,
    Request,
    Stored,
    StreamState,
    checked_subject,
)
from marlaas_api.bus_memory.buckets import MemoryBucket
from marlaas_api.bus_memory.consumers import MemoryConsumer
from marlaas_api.bus_memory.server import Listener, SharedServer
from marlaas_api.bus_memory.stream import ConsumerState, MemoryStream, paged
from marlaas_api.subjects import BUCKETS, STREAMS, BucketSpec, StreamSpec

MAX_PAYLOAD_BYTES = (8 << 20) - 4096


class MemoryServer(SharedServer):
    """The server that the clients share. clock: time in seconds."""

    def connect(self, name: str) -> "MemoryBus":
        """Return a new client."""
        return MemoryBus(self, name)


class MemoryBus:
    """A client of a MemoryServer."""

    def __init__(self, server: SharedServer, name: str) -> None:
        self._server = server
        self._name = name
        self._closed = False

    @property
    def max_payload_bytes(self) -> int:
        return MAX_PAYLOAD_BYTES

    async def publish(
        self, subject: str, data: bytes, *, message_id: str | None = None, expect_last: int | None = None
    ) -> int:
        await self.check(subject, data)
        stream = self._server.stream_of(subject)
        if stream is None:
            raise BusRefused(f'no stream stores "{subject}"; were the streams created by `ensure`?')
        stored = Stored(subject, 0, bytes(data))
        sequence = stream.publish(stored, self._server.clock(), message_id=message_id, expect_last=expect_last)
        self._server.broadcast(Request(subject, "", stored.data))
        self._server.wake(stream.spec.name)
        return sequence

    async def last(self, stream: str, subject: str) -> Stored | None:
        await self.check()
        kept = self._server.stream(stream).last(subject)
        return None if kept is None else kept.stored

    async def replay(self, stream: str, subject: str, start: int = 1) -> list[Stored]:
        await self.check()
        return [kept.stored for kept in self._server.stream(stream).select(subject, start)]

    async def pages(self, stream: str, subject: str, start: int = 1) -> AsyncIterator[list[Stored]]:
        for page in paged(await self.replay(stream, subject, start)):
            yield page

    async def state(self, stream: str) -> StreamState:
        await self.check()
        found = self._server.stream(stream)
        return StreamState(found.last_sequence, found.num_bytes, found.spec.max_bytes)

    async def purge(self, stream: str, subject: str, up_to: int | None = None) -> None:
        await self.check()
        target = self._server.stream(stream)
        for kept in target.select(subject):
            if up_to is None or kept.stored.sequence < up_to:
                target.remove(kept.stored.sequence)

    async def consumer(
        self, stream: str, name: str, subject: str, *, ack_wait_s: float = 30.0, max_pending: int = 1000
    ) -> Consumer:
        await self.check()
        self._server.stream(stream).consume(name, ConsumerState(subject, ack_wait_s, max_pending))
        self._server.wake(stream)
        return MemoryConsumer(self.check, self._server, stream, name)

    async def claims(self, stream: str, name: str, *, ack_wait_s: float = 30.0) -> Consumer:
        return MemoryConsumer(self.check, self._server, stream, name, inspected=False)

    async def position(self, stream: str, name: str) -> Position | None:
        await self.check()
        return self._server.stream(stream).position(name)

    async def delete_consumer(self, stream: str, name: str) -> None:
        await self.check()
        self._server.stream(stream).consumers.pop(name, None)
        self._server.wake(stream)

    async def bucket(self, name: str, *, inspected: bool = True) -> Bucket:
        await self.check()
        if inspected:
            self._server.stream(f"KV_{name}")
        return MemoryBucket(self.check, self._server, name)

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        await self.check(subject, data)
        stream = self._server.stream_of(subject)
        if stream is not None:
            stream.publish(Stored(subject, 0, bytes(data)), self._server.clock())
            self._server.wake(stream.spec.name)
        self._server.broadcast(Request(subject, reply, bytes(data)))

    @asynccontextmanager
    async def listen(
        self, subject: str, handler: Callable[[Request], Awaitable[None]], queue: str = ""
    ) -> AsyncIterator[None]:
        await self.check()
        listener = Listener(subject, queue)

        async def hand_over() -> None:
            while True:
                await handler(await listener.arrivals.get())

        self._server.listeners.append(listener)
        try:
            async with background(hand_over()):
                yield
        finally:
            self._server.listeners.remove(listener)

    def new_inbox(self) -> str:
        return self._server.inbox()

    async def ensure(
        self, streams: tuple[StreamSpec, ...] = STREAMS, buckets: tuple[BucketSpec, ...] = BUCKETS
    ) -> None:
        await self.check()
        for fresh in [*map(MemoryStream, streams), *map(MemoryStream.of_bucket, buckets)]:
            stream = self._server.streams.setdefault(fresh.spec.name, fresh)
            if stream.spec.work_queue != fresh.spec.work_queue:
                raise BusRefused(f"cannot update the stream {fresh.spec.name}: its retention cannot be changed")
            spec = fresh.spec
            if stream.spec.max_bytes > spec.max_bytes > 0:
                spec = replace(spec, max_bytes=stream.spec.max_bytes)
            stream.spec, stream.history, stream.markers = spec, fresh.history, fresh.markers

    async def close(self) -> None:
        self._closed = True

    async def check(self, subject: str = "x", data: bytes = b"") -> None:
        """Yield to other tasks, then raise if a call is not possible: client closed, outage, invalid subject, payload too large.

        Every call of the client begins with it.
        """
        await asyncio.sleep(0)
        if self._closed:
            raise BusRefused(f"the connection of {self._name} is closed")
        if not self._server.available:
            raise BusUnavailable("the bus cannot be reached")
        checked_subject(subject)
        if len(data) > MAX_PAYLOAD_BYTES:
            raise BusRefused(f'{len(data)} bytes for "{subject}" exceed the {MAX_PAYLOAD_BYTES} that fit')
