"""Cache of the bucket `progress`. Only the holder of the lease writes to the bucket, so its cache is exact."""

import asyncio
import logging
from collections.abc import Iterable

from marlaas_api import subjects
from marlaas_api.bus import Bucket, Bus
from marlaas_api.errors import Permanent
from marlaas_api.messages import Progress
from marlaas_api.names import JobRef
from marlaas_api.wire import decode_as, encode

MAX_WRITES = 32

log = logging.getLogger(__name__)


class ProgressStore:
    """The progress of all jobs. Methods that write raise errors of the bus; a failed write does not change the cache."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._bucket: Bucket | None = None
        self._known: dict[str, Progress] = {}
        self._writes = asyncio.Semaphore(MAX_WRITES)

    async def load(self) -> None:
        """Read the progress that an earlier orchestrator wrote. A record that cannot be parsed counts as absent."""
        self._known = {}
        for entry in await (await self._open()).entries():
            try:
                self._known[entry.key] = decode_as(Progress, entry.data or b"")
            except Permanent as error:
                log.error("cannot parse the progress of job %s, it counts as absent: %s", entry.key, error)

    def all(self) -> Iterable[Progress]:
        """Return the progress of every job."""
        return self._known.values()

    def of(self, ref: JobRef) -> Progress | None:
        """Return the job's progress; None if none was written yet."""
        progress = self._known.get(ref.key)
        return progress if progress is not None and progress.uid == ref.uid else None

    def earlier(self, ref: JobRef) -> Progress | None:
        """Return the progress of an earlier job of the same name; None if there is none."""
        progress = self._known.get(ref.key)
        return progress if progress is not None and progress.uid != ref.uid else None

    async def put(self, progress: Progress) -> None:
        """Write a job's progress if it has changed in more than its time."""
        before = self.of(progress.ref)
        if before is not None and before.model_copy(update={"at": progress.at}) == progress:
            return
        async with self._writes:
            await (await self._open()).put(progress.ref.key, encode(progress))
        self._known[progress.ref.key] = progress

    async def put_all(self, all_progress: Iterable[Progress]) -> None:
        """Write many concurrently. Raises the first error after all writes were tried."""
        results = await asyncio.gather(*(self.put(progress) for progress in all_progress), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def forget(self, ref: JobRef) -> None:
        """Delete a job's progress, unless it belongs to another job of the same name."""
        if self.of(ref) is not None:
            await (await self._open()).delete(ref.key)
            del self._known[ref.key]

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._bus.bucket(subjects.PROGRESS)
        return self._bucket
