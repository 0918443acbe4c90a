"""A bucket that only the leading orchestrator writes. Each write is a compare-and-set on the revision that this process knows.

An orchestrator that was cut off, and whose lease another one has taken, may reach NATS again before it notices. Without
the compare-and-set it would overwrite what the other one has written, and nobody would write that again.
"""

from collections import defaultdict
from hashlib import sha256

from marlaas_api.bus import Bucket, Bus, Entry, RevisionConflict
from marlaas_worker.orchestrator.records import LostLease


class FencedBucket:
    """Reads and writes of one bucket. Methods raise LostLease if another process has written the key since the last read."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus, self._name = bus, name
        self._bucket: Bucket | None = None
        self._revisions: dict[str, int] = {}
        # Writes that raised an error and may be stored all the same, now or later.
        self._uncertain: dict[str, set[bytes]] = defaultdict(set)

    async def entries(self, prefix: str = "") -> list[Entry]:
        """Return all present keys that start with `prefix`; later writes expect their revisions."""
        entries = await (await self._open()).entries(prefix)
        self._revisions |= {entry.key: entry.revision for entry in entries}
        return entries

    async def put(self, key: str, data: bytes) -> None:
        """Write a key."""
        bucket, earlier = await self._open(), set(self._uncertain[key])
        self._uncertain[key].add(sha256(data).digest())
        try:
            self._revisions[key] = await self._set(bucket, key, data)
        except RevisionConflict as error:
            entry = await bucket.get(key)
            if entry is None or entry.data is None or sha256(entry.data).digest() not in earlier:
                raise self._lost(key) from error
            self._revisions[key] = await self._again(bucket, key, data, entry.revision)
        del self._uncertain[key]

    async def delete(self, key: str) -> None:
        """Delete a key, if it is present."""
        bucket = await self._open()
        try:
            await bucket.delete(key, self._revisions.get(key, 0))
        except RevisionConflict as error:
            entry = await bucket.get(key)
            if entry is not None and entry.data is not None:
                if sha256(entry.data).digest() not in self._uncertain[key]:
                    raise self._lost(key) from error
                await bucket.delete(key, entry.revision)
        self._revisions.pop(key, None)
        self._uncertain.pop(key, None)

    async def _set(self, bucket: Bucket, key: str, data: bytes) -> int:
        if key not in self._revisions:
            return await bucket.create(key, data)
        return await bucket.update(key, data, self._revisions[key])

    async def _again(self, bucket: Bucket, key: str, data: bytes, revision: int) -> int:
        """Replace an earlier write of this process, whose outcome was uncertain."""
        try:
            return await bucket.update(key, data, revision)
        except RevisionConflict as error:
            raise self._lost(key) from error

    def _lost(self, key: str) -> LostLease:
        return LostLease(f"{key}: another orchestrator has written to the bucket {self._name}")

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._bus.bucket(self._name)
        return self._bucket
