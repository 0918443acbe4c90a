"""The orchestrator's shell: hold the lease, watch job documents, admit, look after admitted jobs, write `progress`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable, Entry
from marlaas_api.errors import MarlaasError, Retryable
from marlaas_api.messages import JobDocument, Phase, Progress, ReplicaReport
from marlaas_api.wire import decode_as, encode
from marlaas_worker.orchestrator.admission import Admission, capacities, decide, in_order
from marlaas_worker.orchestrator.lease import Lease
from marlaas_worker.orchestrator.owned_job import OwnedJob
from marlaas_worker.orchestrator.records import Records
from marlaas_worker.role import RoleContext, wait_for

log = logging.getLogger(__name__)

RENEW_S = 2.0
PERIOD_S = 1.0


async def serve(context: RoleContext) -> None:
    """Run until told to stop: stand by while another orchestrator holds the lease, and look after every job while we do."""
    await context.bus.ensure()
    lease = Lease(context)
    while not context.stop.is_set():
        if await lease.hold():
            log.info("holding the lease")
            await _Service(context, lease).run()
        await wait_for(context.stop, RENEW_S)
    await lease.release()


class _Service:
    def __init__(self, context: RoleContext, lease: Lease) -> None:
        self._context = context
        self._lease = lease
        self._documents: dict[str, JobDocument] = {}
        self._progress: dict[str, Progress] = {}
        self._reports: list[ReplicaReport] = []
        self._owned: dict[str, tuple[OwnedJob, asyncio.Task[None]]] = {}
        self._written: dict[str, Progress] = {}
        self._changed = asyncio.Event()
        self._lost = asyncio.Event()

    async def run(self) -> None:
        """Return when the lease is lost or the process is to stop."""
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._renew(), name="lease"),
            asyncio.create_task(self._follow(subjects.JOBS), name="watch jobs"),
            asyncio.create_task(self._follow(subjects.POLICY), name="watch policy"),
            asyncio.create_task(self._follow(subjects.REPLICAS), name="watch replicas"),
            asyncio.create_task(self._reconcile_for_ever(), name="reconcile"),
            asyncio.create_task(self._context.stop.wait(), name="stop"),
            asyncio.create_task(self._lost.wait(), name="lost"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self._end([*tasks, *(task for _, task in self._owned.values())])

    @staticmethod
    async def _end(tasks: "Sequence[asyncio.Task[Any]]") -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _renew(self) -> None:
        while True:
            try:
                if not await self._lease.hold():
                    log.warning("lost the lease")
                    self._lost.set()
            except Retryable as error:
                log.warning("the lease cannot be renewed now: %s", error)
            await asyncio.sleep(RENEW_S)

    async def _follow(self, bucket_name: str) -> None:
        """A watch is only a reason to look: what is true is read anew each time."""
        while True:
            try:
                bucket = await self._context.bus.bucket(bucket_name)
                watch: AbstractAsyncContextManager[AsyncIterator[Entry]] = bucket.watch()
                async with watch as entries:
                    async for entry in entries:
                        self._look(bucket_name, entry)
            except Retryable as error:
                log.warning("watching %s: %s", bucket_name, error)
            await asyncio.sleep(PERIOD_S)

    def _look(self, bucket_name: str, entry: Entry) -> None:
        if bucket_name != subjects.POLICY:
            self._changed.set()
        for owned, _ in self._owned.values():
            if bucket_name == subjects.REPLICAS or entry.key.startswith(f"{owned.document.ref.key}."):
                owned.wake.set()

    async def _reconcile_for_ever(self) -> None:
        while True:
            try:
                await self._reconcile()
            except BusUnavailable as error:
                log.warning("NATS does not answer (%s); what runs goes on", error)
            await wait_for(self._changed, PERIOD_S)
            self._changed.clear()

    async def _reconcile(self) -> None:
        await self._observe()
        for uid, (owned, task) in list(self._owned.items()):
            if task.done():
                await self._settle(uid, owned, task)
        await self._apply_documents()
        await self._admit()
        await self._write_progress()

    async def _observe(self) -> None:
        bus = self._context.bus
        jobs = await (await bus.bucket(subjects.JOBS)).entries()
        documents = [decode_as(JobDocument, entry.data) for entry in jobs if entry.data]
        self._documents = {document.uid: document for document in documents}
        levels = await (await bus.bucket(subjects.PROGRESS)).entries()
        known = [decode_as(Progress, entry.data) for entry in levels if entry.data]
        self._progress = {level.uid: level for level in known}
        replicas = await (await bus.bucket(subjects.REPLICAS)).entries()
        self._reports = [decode_as(ReplicaReport, entry.data) for entry in replicas if entry.data]

    async def _settle(self, uid: str, owned: OwnedJob, task: "asyncio.Task[None]") -> None:
        """A job's task ended: by itself, or by an error that is the job's failure and nobody else's."""
        del self._owned[uid]
        error = None if task.cancelled() else task.exception()
        level = owned.progress()
        if error is not None:
            log.error("%s failed", owned.document.ref, exc_info=error)
            if not isinstance(error, MarlaasError | AssertionError):
                raise error
            await self._finish_with(owned.document, Phase.FAILED, "BrokenInvariant", str(error))
        elif level is not None and owned.ended is not None:
            await self._put(level)
            await Records(self._context, owned.document).tell(level.reason, level.message)
            await Records(self._context, owned.document).forget_tasks()

    async def _apply_documents(self) -> None:
        for uid, (owned, task) in list(self._owned.items()):
            document = self._documents.get(uid)
            if document is None or document.deleted or document.spec.suspend or document != owned.document:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                del self._owned[uid]
                if document is None or document.deleted:
                    await Records(self._context, owned.document).forget_work()

    async def _admit(self) -> None:
        running = [owned.document for owned, _ in self._owned.values()]
        waiting = [
            document
            for document in self._documents.values()
            if document.uid not in self._owned and not document.deleted and self._unfinished(document)
        ]
        verdicts = decide(in_order(waiting), running, capacities(self._reports))
        for document in waiting:
            verdict = verdicts[document.uid]
            if verdict.admitted:
                self._take(document)
            elif verdict.refused:
                await self._finish_with(document, Phase.FAILED, verdict.reason, verdict.message)
            else:
                await self._put(self._queued(document, verdict))

    def _unfinished(self, document: JobDocument) -> bool:
        level = self._progress.get(document.uid)
        if level is None or not level.phase.final:
            return True
        more = level.phase is Phase.SUCCEEDED and document.spec.training.steps > level.step
        return more and document.generation > level.generation

    def _take(self, document: JobDocument) -> None:
        log.info("%s is admitted", document.ref)
        owned = OwnedJob(self._context, document, self._progress.get(document.uid), lambda: self._reports)
        task = asyncio.create_task(owned.run(), name=f"job {document.ref}")
        task.add_done_callback(lambda _: self._changed.set())
        self._owned[document.uid] = (owned, task)

    async def _write_progress(self) -> None:
        for owned, _ in self._owned.values():
            level = owned.progress() or self._admitted(owned.document)
            await self._put(level)

    async def _put(self, level: Progress) -> None:
        """Write a level if it says anything new; the time alone is nothing new."""
        before = self._written.get(level.uid) or self._progress.get(level.uid)
        if before is not None and before.model_copy(update={"at": level.at}) == level:
            return
        bucket = await self._context.bus.bucket(subjects.PROGRESS)
        await bucket.put(subjects.job_key(level.namespace, level.job), encode(level))
        self._written[level.uid] = level
        self._progress[level.uid] = level

    async def _finish_with(self, document: JobDocument, phase: Phase, reason: str, message: str) -> None:
        before = self._progress.get(document.uid) or self._admitted(document)
        now = self._context.now()
        update = {
            "phase": phase,
            "reason": reason,
            "message": message,
            "admitted": False,
            "finished_at": now,
            "at": now,
        }
        await self._put(before.model_copy(update=update))
        records = Records(self._context, document)
        await records.tell(reason, message)
        await records.forget_tasks()

    def _queued(self, document: JobDocument, verdict: Admission) -> Progress:
        before = self._progress.get(document.uid) or self._admitted(document)
        phase = Phase.SUSPENDED if document.spec.suspend else Phase.QUEUED
        update = {
            "phase": phase,
            "admitted": False,
            "reason": verdict.reason,
            "message": verdict.message,
            "generation": document.generation,
            "steps": document.spec.training.steps,
        }
        return before.model_copy(update=update)

    def _admitted(self, document: JobDocument) -> Progress:
        before = self._progress.get(document.uid)
        update = {
            "phase": Phase.RUNNING,
            "admitted": True,
            "reason": "Admitted",
            "message": "admitted; reading what is on record",
            "generation": document.generation,
            "steps": document.spec.training.steps,
        }
        if before is not None:
            return before.model_copy(update=update)
        return Progress(namespace=document.namespace, job=document.job, uid=document.uid, **update)
