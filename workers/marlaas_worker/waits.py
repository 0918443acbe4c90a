"""Failures because of which jobs wait on this replica: of the blob store, and of documents that cannot be parsed. The replica's report lists them.

Callers of the blob store retry as if nothing were recorded.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from marlaas_api.blobs import BlobRef, Blobs, BlobUnavailable
from marlaas_api.errors import Retryable
from marlaas_api.messages import JobWait

SILENT_S = 30.0
"""Seconds without an answer after which a call of the blob store is reported. An upload of a large adapter takes less."""
KEPT_S = 60.0
"""Seconds for which a failure is reported after it has last occurred: longer than every pause between two retries."""

Cause = tuple[str, str]
"""Key of a failure: the job's uid, and the call or document that fails."""


@dataclass(slots=True)
class _Failure:
    error: Retryable
    since: float
    seen_at: float


@dataclass(slots=True)
class Waits:
    """Records the failures because of which jobs wait on this replica. A failure's key is the job's uid and the call or document that fails.

    now: clock in unix seconds.
    """

    now: Callable[[], float] = time.time
    _failures: dict[Cause, _Failure] = field(default_factory=dict)
    _pending: dict[object, tuple[str, str, float]] = field(default_factory=dict)

    def note(self, uid: str, cause: str, error: Retryable, began: float | None = None) -> None:
        """Record a failure that the caller retries. An error whose `reason` is None is not recorded, because it passes soon.

        Args:
            uid: of the job that waits.
            cause: the call or document that fails.
            began: unix seconds at which the failed call began; None: now.
        """
        if error.reason is None:
            return
        now, known = self.now(), self._failures.get((uid, cause))
        began = now if began is None else began
        since = began if known is None or began - known.seen_at > KEPT_S else known.since
        self._failures[uid, cause] = _Failure(error, since, now)

    def over(self, uid: str, cause: str) -> None:
        """Drop a failure, because a later attempt succeeded."""
        self._failures.pop((uid, cause), None)

    @asynccontextmanager
    async def watched(self, uid: str, call: str, name: str) -> AsyncIterator[None]:
        """Record a call of the blob store, made inside the context, while it has no answer; record also its failure.

        Args:
            uid: of the job that owns the blob; empty for none.
            call: word for the call, such as `read`.
            name: of the blob or folder.
        """
        token, began = object(), self.now()
        self._pending[token] = uid, f"{call} of {name}", began
        try:
            yield
        except BlobUnavailable as error:
            self.note(uid, call, error, began)
            raise
        else:
            self.over(uid, call)
        finally:
            del self._pending[token]

    def reported(self) -> dict[str, JobWait]:
        """Return, by job uid, the wait that has lasted longest: for a failure to end, or for a call that has had no answer for `SILENT_S`."""
        now = self.now()
        busy = {uid for uid, _, _ in self._pending.values()}
        self._failures = {
            cause: one for cause, one in self._failures.items() if now - one.seen_at <= KEPT_S or cause[0] in busy
        }
        found = [(one.since, uid, one.error) for (uid, _), one in self._failures.items()]
        for uid, call, since in self._pending.values():
            if now - since > SILENT_S:
                text = f"the blob store has not answered the {call} yet: check that it runs and can be reached"
                found.append((since, uid, BlobUnavailable(text)))
        found.sort(key=lambda one: one[0], reverse=True)  # the oldest is last, and stays
        return {
            uid: JobWait(reason=error.reason, message=str(error), since=since)
            for since, uid, error in found
            if error.reason is not None
        }


class WatchedBlobs:
    """`Blobs` that passes calls on to another blob store, and records their failures in `waits` for the job that owns the blob."""

    def __init__(self, blobs: Blobs, waits: Waits) -> None:
        self._blobs, self._waits = blobs, waits

    async def put(self, folder: str, filename: str, data: bytes) -> BlobRef:
        async with self._waits.watched(_uid_of(folder), "write", f"{folder}/{filename}"):
            return await self._blobs.put(folder, filename, data)

    async def get(self, ref: BlobRef) -> bytes:
        async with self._waits.watched(_uid_of(ref.name), "read", ref.name):
            return await self._blobs.get(ref)

    async def fetch(self, ref: BlobRef, target: Path) -> None:
        async with self._waits.watched(_uid_of(ref.name), "download", ref.name):
            await self._blobs.fetch(ref, target)

    async def read(self, ref: BlobRef, start: int, num: int) -> bytes:
        async with self._waits.watched(_uid_of(ref.name), "read", ref.name):
            return await self._blobs.read(ref, start, num)

    async def list(self, prefix: str) -> list[str]:
        async with self._waits.watched(_uid_of(prefix), "list", prefix):
            return await self._blobs.list(prefix)

    async def delete(self, name: str) -> None:
        async with self._waits.watched(_uid_of(name), "deletion", name):
            await self._blobs.delete(name)

    async def sweep(self, folder: str) -> None:
        async with self._waits.watched(_uid_of(folder), "sweep", folder):
            await self._blobs.sweep(folder)


def _uid_of(name: str) -> str:
    """Return the uid of the job that owns a blob or a folder (`names.job_prefix`); empty for folders of no job."""
    parts = name.split("/", 3)
    return parts[2] if len(parts) > 2 else ""
