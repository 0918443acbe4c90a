"""Key-value buckets of the bus fake, and their watches."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from marlaas_api.bus import BusUnavailable, Entry, Stored, checked_key, checked_prefix
from marlaas_api.bus_memory.server import Gate, SharedServer
from marlaas_api.bus_memory.stream import Kept, MemoryStream, paged


class MemoryBucket:
    """A key-value bucket."""

    def __init__(self, gate: Gate, server: SharedServer, name: str) -> None:
        self._gate = gate
        self._server = server
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def get(self, key: str) -> Entry | None:
        kept = (await self.stream()).last(self._subject(key))
        return None if kept is None or kept.removal else self.entry(kept)

    async def get_from_leader(self, key: str) -> Entry | None:
        kept = (await self.stream()).last(self._subject(key))
        return None if kept is None else self.entry(kept)

    async def put(self, key: str, data: bytes) -> int:
        return await self._write(key, data)

    async def create(self, key: str, data: bytes, *, message_id: str | None = None) -> int:
        kept = (await self.stream()).last(self._subject(key))
        revision = kept.stored.sequence if kept is not None and kept.removal else 0
        return await self._write(key, data, revision, message_id)

    async def update(self, key: str, data: bytes, revision: int, *, message_id: str | None = None) -> int:
        return await self._write(key, data, revision, message_id)

    async def delete(self, key: str, revision: int | None = None, *, message_id: str | None = None) -> None:
        stream, stored = await self.stream(), Stored(self._subject(key), 0, b"")
        last = stream.publish(stored, self._server.clock(), message_id=message_id, expect_last=revision, removal=True)
        for sequence in stream.by_subject.get(stored.subject, [])[:-1]:
            if sequence < last:
                stream.remove(sequence)
        self._server.wake(stream.spec.name)

    async def entries(self, prefix: str = "") -> list[Entry]:
        return [entry for entry in self.newest(await self.stream(), prefix) if entry.data is not None]

    async def pages(self, prefix: str = "") -> AsyncIterator[list[Entry]]:
        for page in paged(self.newest(await self.stream(), prefix)):
            yield page

    @asynccontextmanager
    async def watch(self, prefix: str = "") -> AsyncIterator[AsyncIterator[Entry]]:
        self.pattern(prefix)
        yield MemoryWatch(self, self._server, prefix)

    async def stream(self) -> MemoryStream:
        """Return the bucket's stream after expiry. Raises BusUnavailable, BusRefused."""
        await self._gate()
        return self._server.stream(f"KV_{self._name}")

    def newest(self, stream: MemoryStream, prefix: str) -> list[Entry]:
        """Return the newest entry of every key, removals included, oldest change first."""
        newest = {kept.stored.subject: kept for kept in stream.select(self.pattern(prefix))}
        return [self.entry(kept) for kept in sorted(newest.values(), key=lambda kept: kept.stored.sequence)]

    def entry(self, kept: Kept) -> Entry:
        """Convert a message to an entry."""
        key = kept.stored.subject.removeprefix(f"$KV.{self._name}.")
        return Entry(key, None if kept.removal else kept.stored.data, kept.stored.sequence)

    def pattern(self, prefix: str) -> str:
        """Return the pattern of all keys with a prefix. Raises BusRefused."""
        return f"$KV.{self._name}.{checked_prefix(prefix)}>"

    async def _write(self, key: str, data: bytes, revision: int | None = None, message_id: str | None = None) -> int:
        stored = Stored(self._subject(key), 0, bytes(data))
        stream = await self.stream()
        revision = stream.publish(stored, self._server.clock(), message_id=message_id, expect_last=revision)
        self._server.wake(stream.spec.name)
        return revision

    def _subject(self, key: str) -> str:
        return f"$KV.{self._name}.{checked_key(key)}"


class MemoryWatch:
    """The iterator of `Bucket.watch`: present keys, then changes; it starts again after an outage."""

    def __init__(self, bucket: MemoryBucket, server: SharedServer, prefix: str) -> None:
        self._bucket = bucket
        self._server = server
        self._prefix = prefix
        self._ready: deque[Entry] = deque()
        self._known: dict[str, int] = {}
        self._next: int | None = None

    def __aiter__(self) -> "MemoryWatch":
        return self

    async def __anext__(self) -> Entry:
        while not self._ready:
            try:
                stream = await self._bucket.stream()
            except BusUnavailable:
                self._next = None
                await self._server.change(None, None)
                continue
            if not self._look(stream):
                await self._server.change(None, stream.next_expiry(), stream.spec.name)
        return self._ready.popleft()

    def _look(self, stream: MemoryStream) -> bool:
        if self._next is None:
            self._begin(self._bucket.newest(stream, self._prefix))
        else:
            self._ready.extend(map(self._bucket.entry, stream.select(self._bucket.pattern(self._prefix), self._next)))
        self._next = stream.last_sequence + 1
        for entry in self._ready:
            self._known[entry.key] = entry.revision
            if entry.data is None:
                del self._known[entry.key]
        return bool(self._ready)

    def _begin(self, entries: list[Entry]) -> None:
        newest = {entry.key: entry for entry in entries}
        for key in sorted(self._known):
            entry = newest.get(key, Entry(key, None, self._known[key]))
            if entry.data is None:
                self._ready.append(entry)
        self._ready.extend(entry for entry in entries if entry.data is not None)
