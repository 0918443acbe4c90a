"""Job documents, progress and tenants' usage on the bus: cached reads, and the only writer of documents.

While the bus is unavailable, the caches keep their content, and `BusHealth.state` says so. No reconcile waits for the bus.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from marlaas_api import subjects
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import Bucket, Bus, BusUnavailable, Entry
from marlaas_api.errors import MarlaasError, Retryable, Unreadable
from marlaas_api.fenced import FencedKey, Overtaken
from marlaas_api.messages import ExportReport, JobDocument, Progress, TenantUsage
from marlaas_api.wire import encode
from marlaas_operator.bus_health import BusHealth
from marlaas_operator.plan import WriteDocument

log = logging.getLogger(__name__)

REREAD_S = 60.0
_RETRY_S = 1.0


class Stale(Retryable):
    """The document on the bus is not the one that the plan was made from: observe and plan again."""


class JobDocuments:
    """The buckets `jobs` and `progress` with keys `<namespace>.<job>`, and the usage of tenants.

    Args:
        open_bus: connects; called again until it succeeds.
        health: state of the bus, kept by `run`.
        changed: called with every key whose document or progress changed.
        usage_changed: called with every tenant whose usage changed.
    """

    def __init__(
        self,
        open_bus: Callable[[], Awaitable[Bus]],
        health: BusHealth,
        changed: Callable[[str], None],
        usage_changed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._open_bus = open_bus
        self._health = health
        self._bus: Bus | None = None
        self._jobs: Bucket | None = None
        self._documents = BucketCache(self._jobs_bucket, JobDocument, changed, reread_s=REREAD_S)
        self._progress = BucketCache(self._progress_bucket, Progress, changed, reread_s=REREAD_S)
        self._reports = BucketCache(self._exports_bucket, ExportReport, changed, reread_s=REREAD_S)
        self._usage = BucketCache(
            self._tenants_bucket,
            TenantUsage,
            lambda key: usage_changed(key.removeprefix(subjects.TENANT_USAGE)),
            reread_s=REREAD_S,
            prefix=subjects.TENANT_USAGE,
        )

    async def run(self) -> None:
        """Keep the caches and the health current until cancelled."""
        try:
            replicas = await self._connected()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._health.follow(replicas), name="bus health")
                tasks.create_task(self._documents.follow(), name="follow jobs")
                tasks.create_task(self._progress.follow(), name="follow progress")
                tasks.create_task(self._usage.follow(), name="follow usage")
                tasks.create_task(self._reports.follow(), name="follow exporters")
                await self._documents.synced.wait()
                await self._progress.synced.wait()
                await self._usage.synced.wait()
                self._health.mark_synced()
        finally:
            if self._bus is not None:
                await self._bus.close()

    def document(self, key: str) -> JobDocument | None:
        """Return the job's document, whatever its uid; None if absent. See `unreadable`."""
        return self._documents.get(key)

    def progress(self, key: str) -> Progress | None:
        """Return the job's progress, whatever its uid; None if absent. See `unreadable`."""
        return self._progress.get(key)

    def report(self, key: str) -> ExportReport | None:
        """Return the last report of a job's exporter that can be read, whatever its uid; None if there is none."""
        return self._reports.get(key)

    def usage(self, tenant: str) -> TenantUsage | None:
        """Return the tenant's usage; None if absent or not decodable."""
        return self._usage.get(subjects.tenant_usage_key(tenant))

    def unreadable(self, key: str) -> str:
        """Return why the job's document or progress cannot be parsed; empty if both can.

        Then the last one that could is returned, or None if this process has read none.
        """
        return self._documents.unreadable(key) or self._progress.unreadable(key)

    def revisions(self, key: str) -> tuple[int, int]:
        """Return the revisions of the job's document and progress, 0 where none was seen."""
        document, progress = self._documents.entry(key), self._progress.entry(key)
        return document.revision if document is not None else 0, progress.revision if progress is not None else 0

    def keys(self) -> list[str]:
        """Return the keys that have a document."""
        return self._documents.present()

    async def write(self, action: WriteDocument) -> None:
        """Write a document if `action.replaces` is still the current one.

        A failed write does not change the bus's state: a full store refuses writes but still answers the heartbeat.

        Raises:
            Stale: another document is there by now.
            Unreadable: a newer release's document is there.
            BusRefused: the bus refuses the write.
            BusUnavailable: the bus does not answer; raised at once while it is known to be unavailable.
        """
        document = action.document
        key = subjects.job_key(document.namespace, document.job)
        if not self._health.state.available:
            raise BusUnavailable("the bus does not answer at present")
        if why := self._documents.unreadable(key):
            raise Unreadable(why)
        if self.document(key) != action.replaces:
            raise Stale(f"the document of {key} has changed meanwhile")
        data, entry = encode(document), self._documents.entry(key)
        known = entry.revision if entry is not None and entry.data is not None else None
        fenced = FencedKey(await self._jobs_bucket(), key, known)
        try:
            await fenced.write(data)
        except Overtaken as error:
            await self._documents.read(key)
            raise Stale(f"another writer has changed the document of {key}") from error
        assert fenced.revision is not None
        self._documents.note(Entry(key, data, fenced.revision))

    async def _connected(self) -> Bucket:
        """Connect, and return the bucket `replicas`; retry until every bucket is there."""
        while True:
            try:
                self._bus = self._bus or await self._open_bus()
                self._jobs = await self._bus.bucket(subjects.JOBS)
                await self._progress_bucket()
                return await self._bus.bucket(subjects.REPLICAS)
            except MarlaasError as error:
                log.warning("no bus yet: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _jobs_bucket(self) -> Bucket:
        assert self._jobs is not None, "nothing is read or written before the connection"
        return self._jobs

    async def _progress_bucket(self) -> Bucket:
        assert self._bus is not None, "nothing is read before the connection"
        return await self._bus.bucket(subjects.PROGRESS)

    async def _exports_bucket(self) -> Bucket:
        assert self._bus is not None, "nothing is read before the connection"
        return await self._bus.bucket(subjects.EXPORTS)

    async def _tenants_bucket(self) -> Bucket:
        assert self._bus is not None, "nothing is read before the connection"
        return await self._bus.bucket(subjects.TENANTS)
