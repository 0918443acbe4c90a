"""A bucket that only the leading orchestrator writes. Each write is a compare-and-set on the revision that this process knows.

An orchestrator that was cut off and replaced may reach NATS again before it notices that it lost its lease. Without the
compare-and-set, it would overwrite newer values, which are not written again.
"""

from hashlib import sha256

from marlaas_api.bus import Bucket, Bus, Entry, RevisionConflict
from marlaas_worker.orchestrator.lease import LostLease


class FencedBucket:
    """Reads and writes of one bucket. Methods raise LostLease if another process has written the key since the last read."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus, self._name = bus, name
        self._bucket: Bucket | None = None
        self._revisions: dict[str, int] = {}
        # Digests, by key, of writes whose result is unknown; None: a deletion.
        self._uncertain: dict[str, frozenset[bytes | None]] = {}

    async def entries(self, prefix: str = "") -> list[Entry]:
        """Return all present keys that start with `prefix`; later writes expect their revisions."""
        entries = await (await self._open()).entries(prefix)
        self._revisions |= {entry.key: entry.revision for entry in entries}
        return entries

    async def put(self, key: str, data: bytes) -> None:
        """Write a key."""
        await self._write(key, data)

    async def delete(self, key: str) -> None:
        """Delete a key, if it is present."""
        if key in self._revisions or key in self._uncertain:
            await self._write(key, None)

    async def _write(self, key: str, data: bytes | None) -> None:
        bucket = await self._open()
        try:
            await self._set(bucket, key, data)
        except RevisionConflict as error:
            await self._accept_own(bucket, key, error)
            is_done = data is None and key not in self._revisions
            try:
                if not is_done:
                    await self._set(bucket, key, data)
            except RevisionConflict as second:
                raise self._lost(key) from second
        self._uncertain.pop(key, None)

    async def _set(self, bucket: Bucket, key: str, data: bytes | None) -> None:
        revision, earlier = self._revisions.get(key), self._uncertain.get(key, frozenset())
        self._uncertain[key] = earlier | {_digest(data)}
        try:
            if data is None:
                await bucket.delete(key, revision or 0)
            elif revision is None:
                revision = await bucket.create(key, data)
            else:
                revision = await bucket.update(key, data, revision)
        except RevisionConflict:
            self._uncertain[key] = earlier  # the server has refused this write
            raise
        self._note(key, revision if data is not None else None)

    def _note(self, key: str, revision: int | None) -> None:
        self._revisions.pop(key, None)
        if revision is not None:
            self._revisions[key] = revision

    async def _accept_own(self, bucket: Bucket, key: str, error: RevisionConflict) -> None:
        """Note the revision of an earlier write of this process. Raises LostLease if another process wrote the key."""
        entry = await bucket.get_from_leader(key)
        found = None if entry is None else entry.data
        if _digest(found) not in self._uncertain[key]:
            raise self._lost(key) from error
        self._note(key, entry.revision if entry is not None and found is not None else None)

    def _lost(self, key: str) -> LostLease:
        return LostLease(f"{key}: another orchestrator has written to the bucket {self._name}")

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._bus.bucket(self._name)
        return self._bucket


def _digest(data: bytes | None) -> bytes | None:
    return None if data is None else sha256(data).digest()
