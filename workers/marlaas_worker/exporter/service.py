"""The exporter: reads one job's records on the bus, sends them to trackers and webhooks, and uploads its adapters. The job never waits for it.

Invariant: a row is delivered once, because the tracker is asked which rows it has. The mark of a message or an upload is stored only
after the webhook or the target has taken it, so a crash in between repeats it. The exporter may be killed at any time: all that the next
one needs is in the trackers and in the job's key of KV `exports`.
"""

import asyncio
import contextlib
import logging
import os

from marlaas.trackers.seam import End
from marlaas_api import subjects
from marlaas_api.errors import Permanent, Retryable, Unreadable
from marlaas_api.messages import ExportReport, JobDocument
from marlaas_api.retries import patiently
from marlaas_api.wire import decode_as, encode
from marlaas_worker.exporter.destinations import (
    Courier,
    Destination,
    JobView,
    TrackerDestination,
    WebhookDestination,
    in_thread,
)
from marlaas_worker.exporter.reader import JobReader
from marlaas_worker.exporter.uploads import BusSource, UploadDestination, drop_aws_variables, remote_target
from marlaas_worker.role import RoleContext

POLL_S = 2.0
REPORT_S = 3600.0
"""Time after which an unchanged report is written again: its key would expire after a week."""
CLOSE_S = 8.0
_RETRY_S = 2.0
_MOST_MARKS = 64
SETTINGS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""Environment variables. A retry by MLflow's client could store a row twice; the exporter asks the tracker before it retries."""

log = logging.getLogger(__name__)


async def serve(context: RoleContext, document: JobDocument, poll_s: float = POLL_S) -> None:
    """Export a job until `context.stop`. poll_s: seconds between two reads of the job."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if "s3" in document.spec.export.remote_uploads:
        drop_aws_variables()
    await Exporter(context, document, poll_s).run()


class Exporter:
    """Exporter of one job: reads the job, delivers to its destinations, and keeps the job's ExportReport in KV `exports`.

    Args:
        document: the job's document at the start.
        poll_s: seconds between two reads of the job.

    Attributes:
        destinations: the job's trackers, webhooks and upload targets.
        couriers: one for each destination, in the same order; it delivers.
    """

    def __init__(self, context: RoleContext, document: JobDocument, poll_s: float = POLL_S) -> None:
        self._context = context
        self._poll_s = poll_s
        self._reader = JobReader(context.bus, document)
        self._begun_at = context.now()
        self._told: list[str] = []
        self._uploaded: list[str] = []
        self._stored: ExportReport | None = None
        self._stored_at = float("-inf")
        self._has_read = False
        export = document.spec.export
        self._trackers = [TrackerDestination(name, context.scratch / name) for name in export.remote_trackers]
        webhooks = [WebhookDestination(entry, self._told) for entry in range(len(export.notify))]
        source = BusSource(context.bus, document, asyncio.get_running_loop())
        self._uploads = [
            UploadDestination(remote_target(name, export), source, context.scratch / name, self._uploaded)
            for name in export.remote_uploads
        ]
        self.destinations: list[Destination] = [*self._trackers, *webhooks, *self._uploads]
        self._changed = asyncio.Event()
        self.couriers = [Courier(one, self._view, self._changed.set) for one in self.destinations]
        context.metrics.ready = lambda: self._has_read

    async def run(self) -> None:
        """Export until asked to stop, then close the destinations."""
        await patiently(self._recall, "reading the last report", _RETRY_S)
        stop = self._context.stop
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one.run(self._poll_s), name=one.destination.name) for one in self.couriers]
            while not stop.is_set():
                await self._tick()
                await self._wait()
            for task in running:
                task.cancel()
        await self._close()

    async def _recall(self) -> None:
        """Restore the marks of what was delivered, and the URLs, from the last report of an earlier exporter of this job."""
        bucket = await self._context.bus.bucket(subjects.EXPORTS, inspected=False)
        entry = await bucket.get(self._key)
        if entry is None or entry.data is None:
            return
        try:
            report = decode_as(ExportReport, entry.data)
        except Unreadable as error:
            log.warning("the last report cannot be read, and is replaced: %s", error)
            return
        if report.uid == self._reader.first.uid:
            self._told[:], self._uploaded[:] = report.told, report.uploaded
            urls = {one.name: one.url for one in report.destinations}
            for tracker in self._trackers:
                tracker.ended, tracker.url = report.ended, urls.get(tracker.name, "")
            for upload in self._uploads:
                upload.url = urls.get(upload.name, "")

    async def _tick(self) -> None:
        try:
            await self._reader.read()
            self._has_read = True
            await self._store()
        except (Retryable, Permanent, Unreadable) as error:
            log.warning("cannot read or report the job, trying again: %s", error)

    async def _store(self) -> None:
        """Write the report if it has changed, or is an hour old."""
        now, report = self._context.now(), self._report()
        if report != self._stored or now - self._stored_at >= REPORT_S:
            bucket = await self._context.bus.bucket(subjects.EXPORTS, inspected=False)
            await bucket.put(self._key, encode(report.model_copy(update={"at": now})))
            self._stored, self._stored_at = report, now

    def _report(self) -> ExportReport:
        view = self._view()
        has_all = view is not None and not any(one.lacks(view) for one in self.destinations)
        progress, first = self._reader.progress, self._reader.first
        return ExportReport(
            namespace=first.namespace,
            job=first.job,
            uid=first.uid,
            destinations=tuple(one.report() for one in self.couriers),
            told=tuple(self._told[-_MOST_MARKS:]),
            uploaded=tuple(self._uploaded[-_MOST_MARKS:]),
            ended=progress.rest_mark if progress is not None and has_all else "",
        )

    async def _wait(self) -> None:
        """Wait for `poll_s`, or until the state of a destination changes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._poll_s):
                await self._changed.wait()
        self._changed.clear()

    def _view(self) -> JobView | None:
        reader, now = self._reader, self._context.now()
        if not self._has_read or reader.document is None:  # not read yet, or deleted
            return None
        active_at = max(reader.active_at, self._begun_at)
        links = tuple(one.url for one in self._trackers if one.url.startswith("http"))
        return JobView(reader.document, tuple(reader.rows), reader.progress, active_at, links, now)

    async def _close(self) -> None:
        """Close the destinations, within twice `CLOSE_S`. Trackers learn if the job was deleted; else the next exporter may resume its runs."""
        end: End | None = None
        with contextlib.suppress(Retryable, Permanent, Unreadable, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._reader.read()
                document = self._reader.document
                end = End.DELETED if document is None or document.deleted else None
        closing = [in_thread(lambda one=one: one.close(end), one.name) for one in self.destinations]  # type: ignore[misc]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*closing, return_exceptions=True)

    @property
    def _key(self) -> str:
        first = self._reader.first
        return subjects.job_key(first.namespace, first.job)
