"""Fenced writes: a key of a bucket, or a subject of a stream, that one process at a time may write.

Each write is a compare-and-set on the revision that this process knows. A process that was cut off and replaced may
reach NATS again before it notices; it then overwrites nothing.

The reply to a write may be lost. The write keeps its message id until its outcome is known, and is repeated under that id
before the next write. nats-server looks up the id first if a stream is replicated. Otherwise it compares the revision
first and refuses the repeated write; `Bus` then compares the id with that of the last message. The id is random, not
derived from key, revision and content: a key that is created, deleted, and created again with the same content within two
minutes would otherwise keep its deletion.
"""

import asyncio
import os
from dataclasses import dataclass

from marlaas_api.bus import Bucket, Bus, BusRefused, Entry, RevisionConflict


class Overtaken(Exception):
    """Another process has written the key or subject since this process read it: read again before the next decision.

    Not a MarlaasError, so that no handler of failed calls mistakes it for one and goes on.
    """


@dataclass(frozen=True, slots=True)
class _Write:
    """A write whose outcome is not known yet. data: None deletes."""

    data: bytes | None
    message_id: str


class _Fence:
    """Writes one after another. revision: of the last known write; None or 0: there is none."""

    def __init__(self, revision: int | None) -> None:
        self.revision = revision
        self._pending: _Write | None = None
        self._lock = asyncio.Lock()

    async def _write(self, data: bytes | None) -> None:
        async with self._lock:
            if self._pending is not None and self._pending.data != data:
                await self._settle(self._pending)
            self._pending = self._pending or _Write(data, os.urandom(12).hex())
            await self._settle(self._pending)

    async def _settle(self, write: _Write) -> None:
        try:
            self.revision = await self._send(write.data, write.message_id)
        except RevisionConflict as error:  # the write stays pending, so that every later one is refused, too
            raise Overtaken(f"another process has written to {self}") from error
        except BusRefused:
            self._pending = None  # repeating it would block every later write
            raise
        self._pending = None

    async def _send(self, data: bytes | None, message_id: str) -> int | None:
        raise NotImplementedError


class FencedKey(_Fence):
    """One key. Without a known revision, a write creates it.

    Methods that write raise Overtaken, and errors of the bus. After BusUnavailable the write may have happened: the next
    write settles it first.
    """

    def __init__(self, bucket: Bucket, key: str, revision: int | None = None) -> None:
        super().__init__(revision)
        self._bucket, self._key = bucket, key

    def __str__(self) -> str:
        return f"the key {self._key} of the bucket {self._bucket.name}"

    async def read(self) -> bytes | None:
        """Return the value, None if the key is absent. Later writes expect its revision."""
        entry = await self._bucket.get_from_leader(self._key)
        self._pending = None
        self.revision = entry.revision if entry is not None and entry.data is not None else None
        return None if entry is None else entry.data

    async def write(self, data: bytes) -> None:
        """Set the value. Raises Overtaken, and errors of the bus."""
        await self._write(data)

    async def delete(self) -> None:
        """Delete the key. Does nothing if this process knows no value of it."""
        if self.revision is not None or self._pending is not None:
            await self._write(None)

    async def _send(self, data: bytes | None, message_id: str) -> int | None:
        if data is None:
            await self._bucket.delete(self._key, self.revision or 0, message_id=message_id)
            return None
        if self.revision is None:
            return await self._bucket.create(self._key, data, message_id=message_id)
        return await self._bucket.update(self._key, data, self.revision, message_id=message_id)


class FencedKeys:
    """The keys of one bucket, each fenced by itself."""

    def __init__(self, bus: Bus, bucket: str) -> None:
        self._bus, self._name = bus, bucket
        self._bucket: Bucket | None = None
        self._keys: dict[str, FencedKey] = {}

    async def entries(self, prefix: str = "") -> list[Entry]:
        """Return all present keys that start with `prefix`; later writes expect their revisions."""
        bucket = await self._open()
        entries = await bucket.entries(prefix)
        self._keys |= {entry.key: FencedKey(bucket, entry.key, entry.revision) for entry in entries}
        return entries

    async def write(self, key: str, data: bytes) -> None:
        """Set the value of a key. Raises Overtaken, and errors of the bus."""
        if key not in self._keys:
            self._keys.setdefault(key, FencedKey(await self._open(), key))
        await self._keys[key].write(data)

    async def delete(self, key: str) -> None:
        """Delete a key. Raises Overtaken, and errors of the bus."""
        if key in self._keys:
            await self._keys[key].delete()
            del self._keys[key]

    async def _open(self) -> Bucket:
        self._bucket = self._bucket or await self._bus.bucket(self._name)
        return self._bucket


class FencedSubject(_Fence):
    """One subject of a stream, to which one process at a time appends. last: sequence of its last message; 0: it has none."""

    def __init__(self, bus: Bus, subject: str, last: int = 0) -> None:
        super().__init__(last)
        self._bus, self._subject = bus, subject

    def __str__(self) -> str:
        return f"the subject {self._subject}"

    @property
    def last(self) -> int:
        """Sequence of the last message, as far as this process knows; 0: the subject has none."""
        return self.revision or 0

    async def append(self, data: bytes) -> int:
        """Store a message and return its sequence. Raises Overtaken, and errors of the bus; see FencedKey."""
        await self._write(data)
        return self.last

    async def _send(self, data: bytes | None, message_id: str) -> int | None:
        assert data is not None, "nothing deletes a message through the fence"
        return await self._bus.publish(self._subject, data, message_id=message_id, expect_last=self.last)
