"""The orchestrator's main loop. While this replica holds the lease, it reads the job documents, admits jobs and runs their control loops,
publishes their progress, and deletes the data of deleted jobs.
"""

import asyncio
import logging
from typing import Any

from marlaas_api import subjects
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.failpoints import failpoint
from marlaas_api.fenced import Overtaken
from marlaas_api.messages import JobDocument, Phase, PolicyRecord, Progress, ReplicaReport
from marlaas_api.names import JobRef
from marlaas_api.reasons import Reason
from marlaas_api.retries import patiently
from marlaas_worker.orchestrator import reports as job_reports
from marlaas_worker.orchestrator.admission import AdmissionQueue, AdmissionScene, stored_bytes, terms_of
from marlaas_worker.orchestrator.capacity import capacities
from marlaas_worker.orchestrator.deletion import MAX_DELETES, DeletedJob, delete
from marlaas_worker.orchestrator.jobs import Jobs, stops
from marlaas_worker.orchestrator.lease import RENEW_S, LeaderLease
from marlaas_worker.orchestrator.metrics import samples
from marlaas_worker.orchestrator.owned_job import OwnedJob
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.orchestrator.published_adapters import PublishedAdapters
from marlaas_worker.orchestrator.records import Records, SharedState
from marlaas_worker.orchestrator.stream_space import StreamSpace
from marlaas_worker.orchestrator.tenants import TenantUse
from marlaas_worker.orchestrator.usage import has_just_ended, with_late_use
from marlaas_worker.role import RoleContext, end_tasks, wait_for

log = logging.getLogger(__name__)

PERIOD_S = 1.0
# Pause between two reconciles, so that a burst of a thousand documents is handled by one reconcile.
PAUSE_S = 0.05


async def serve(context: RoleContext) -> None:
    """Run until the stop event: run all jobs while this replica holds the lease, and stand by otherwise."""
    await context.bus.ensure()
    context.metrics.ready = lambda: context.metrics.connected()
    lease = LeaderLease(context)
    while not context.stop.is_set():
        if await lease.hold():
            log.info("took the lease")
            try:
                await _Service(context, lease).run()
            except* Overtaken as errors:
                log.warning("%s; reading everything again if this replica still leads", errors.exceptions[0])
        context.metrics.samples = lambda: samples((), leads=False)
        await wait_for(context.stop, RENEW_S)
    await lease.release()


class _Service:
    """The work of this replica while it holds the lease. A new object is created when the lease is taken again."""

    def __init__(self, context: RoleContext, lease: LeaderLease) -> None:
        self._context = context
        self._lease = lease
        self._changed = asyncio.Event()
        self._documents = BucketCache(
            lambda: context.bus.bucket(subjects.JOBS), JobDocument, lambda _: self._changed.set()
        )
        self._policies = BucketCache(
            lambda: context.bus.bucket(subjects.POLICY),
            PolicyRecord,
            lambda key: self._jobs.wake(key.rpartition(".")[0]),
        )
        bucket = lambda: context.bus.bucket(subjects.REPLICAS)  # noqa: E731
        self._replicas = BucketCache(bucket, ReplicaReport, lambda _: self._changed.set())
        store = self._progress_store = ProgressStore(context.bus)
        self._reports: list[ReplicaReport] = []
        self._jobs = Jobs(context, store, lambda: self._reports, self._changed.set)
        self._deletions: dict[str, asyncio.Task[None]] = {}
        self._deletion_slots = asyncio.Semaphore(MAX_DELETES)
        self._queue = AdmissionQueue()
        self._tenants = TenantUse(context.bus, self._queue)
        self._space = StreamSpace()
        self._shared = SharedState(lambda: self._reports, self._policies, self._space, lambda: self._jobs.num_running)
        self._adapters = PublishedAdapters(context, self._documents, store.of)
        context.metrics.samples = lambda: samples(store.all(), True, store.accounts.totals())

    async def run(self) -> None:
        """Run all jobs; return when the lease is lost or the process is to stop."""
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._lease.renew(), name="lease"),
            asyncio.create_task(self._policies.follow(), name="follow policy"),
            asyncio.create_task(self._replicas.follow(), name="follow replicas"),
            asyncio.create_task(self._reconcile_for_ever(), name="reconcile"),
            asyncio.create_task(self._context.stop.wait(), name="stop"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end_tasks(tasks)
            await self._jobs.stop_all()
            await end_tasks(list(self._deletions.values()))  # the next orchestrator repeats them

    async def _reconcile_for_ever(self) -> None:
        await self._begin()
        async with asyncio.TaskGroup() as beside:
            beside.create_task(self._documents.follow(), name="follow jobs")
            beside.create_task(self._jobs.purge_turns(), name="purge turns")
            beside.create_task(self._adapters.serve(), name="answer exporters")
            while True:
                await patiently(self._reconcile, "reconcile failed, running jobs are kept", PERIOD_S)
                await asyncio.sleep(PAUSE_S)
                await wait_for(self._changed, PERIOD_S)
                self._changed.clear()

    async def _begin(self) -> None:
        """Read all state once before the first reconcile, so that no decision depends on partial state."""

        async def read() -> None:
            await self._progress_store.load()
            await self._tenants.load()
            await self._documents.refresh()
            await self._replicas.refresh()
            turns = await self._space.refresh(self._context.bus)
            await self._jobs.begin(turns.last_sequence)

        await patiently(read, "reading the first state, nothing is decided yet", PAUSE_S)

    async def _reconcile(self) -> None:
        documents = {document.uid: document for _, document, _ in self._documents.items()}
        await self._space.refresh(self._context.bus)
        self._reports = [report for _, report, _ in self._replicas.items()]
        await self._jobs.write_ends()
        await self._jobs.finish()
        await self._jobs.purge_late_turns()
        await self._jobs.update(documents)
        self._delete(documents)
        await self._stop_preempted()
        await self._admit(documents)
        await self._progress_store.put_running([self._progress(owned) for owned in self._jobs.take_moved()])
        await self._add_late_use()
        await self._progress_store.accounts.save(self._progress_store.all(), self._context.now())
        await self._tenants.save(self._context.now())
        await self._jobs.finish()

    async def _add_late_use(self) -> None:
        """Add to the progress of recently ended jobs (`has_just_ended`) the usage that replicas have reported since it was written.

        Jobs that are being deleted are skipped: their deletion adds this usage.
        """
        now = self._context.now()
        ended = [one for one in self._progress_store.all() if has_just_ended(one, now)]
        present = (one for one in ended if not self._is_deleted(one.ref))
        await self._progress_store.put_all([with_late_use(one, self._reports, now) for one in present])

    def _delete(self, documents: dict[str, JobDocument]) -> None:
        """Start the deletion of deleted jobs, and of earlier jobs whose name a later job has taken.

        Raises the unexpected errors of deletions, those that are not MarlaasError.
        """
        for key, task in list(self._deletions.items()):
            if task.done():
                del self._deletions[key]
                task.result()
        for document in documents.values():
            if self._progress_store.is_unreadable(document.ref) or self._is_deleted(document.ref):
                continue
            earlier = self._progress_store.earlier(document.ref)
            if earlier is not None:
                self._begin_deletion(DeletedJob.by_progress(earlier))
            elif document.deleted:
                self._begin_deletion(DeletedJob.by_document(document))

    def _begin_deletion(self, job: DeletedJob) -> None:
        work = delete(self._context, self._progress_store, lambda: self._reports, job, self._deletion_slots)
        task = self._deletions[job.ref.key] = asyncio.create_task(work, name=f"delete {job.ref}")
        task.add_done_callback(lambda _: self._changed.set())

    def _is_deleted(self, ref: JobRef) -> bool:
        """Return whether a deletion of a job of this name is in progress. Jobs of this name are not admitted before it has ended."""
        return ref.key in self._deletions

    async def _stop_preempted(self) -> None:
        """Stop the loops of the preempted jobs that may stop now (`IssueHolds.may_stop`), and queue these jobs.

        Their queued tasks are purged. Unfinished tasks are issued again after the next admission.

        A job's progress is written after its loop was cancelled: if this process is killed in between, the job stays admitted.
        """
        for owned in self._jobs.running():
            if owned.may_stop:
                document, progress, why = owned.document, self._progress(owned), owned.holds.preempted
                job = self._jobs.of(document)
                await self._jobs.stop(job)
                self._jobs.detach(job)
                log.info("preempted job %s: %s", document.ref, why)
                await self._progress_store.put(job_reports.preempted(document, progress, await owned.cut_plays(), why))
                failpoint("orchestrator.preempt.after_progress")
                self._queue.left(document)
                records = Records(self._context, document)
                await records.purge_tasks()
                await records.emit(Reason.PREEMPTED, why)

    async def _admit(self, documents: dict[str, JobDocument]) -> None:
        """Start the control loops of admitted jobs, and decide which waiting jobs are admitted.

        Jobs that are recorded as admitted but have no loop, as after a restart, start first, even if their pools now lack the slots.
        Waiting jobs with a verdict fail. Of the others, some are admitted, and running jobs may be asked to stop for them (preemption).
        For each job that still waits, the reason is published in its progress.

        documents: of all jobs, by uid.
        """
        holding = [one for one in documents.values() if self._progress_store.is_admitted(one.ref) and not stops(one)]
        for document in documents.values():
            if document.verdict is not None and self._waits(document):
                await self._jobs.fail(document, document.verdict)
        for document in holding:
            if self._waits(document):
                await self._take(document)
        scene = self._scene(documents, holding)
        decision = self._queue.decide(scene)
        waiting = [one for one in documents.values() if one.uid in decision.admissions]
        for document in waiting:
            if decision.admissions[document.uid].admitted and self._jobs.of(document).owned is None:
                await self._take(document)
                self._queue.entered(document)
        for owned in self._jobs.running():
            owned.preempt(decision.preempted.get(owned.document.uid, ""))
        queued = [(one, why) for one in waiting if not (why := decision.admissions[one.uid]).admitted]
        queued = [(one, why) for one, why in queued if not self._jobs.of(one).has_published(one, why)]
        before = self._progress_store.of
        await self._progress_store.put_all(job_reports.queued(one, before(one.ref), why) for one, why in queued)
        for one, why in queued:
            self._jobs.of(one).published = one, why

    def _scene(self, documents: dict[str, JobDocument], holding: list[JobDocument]) -> AdmissionScene:
        """Return the values on which admissions depend.

        Also add the tenants' use since the last call to their past use, and have the jobs of tenants over a rate issue no tasks.

        Args:
            documents: all job documents, by uid.
            holding: the documents of admitted jobs.
        """
        now, places = self._context.now(), {document.uid for document in holding}
        known = {progress.uid: progress for progress in self._progress_store.all()}
        terms = terms_of((self._revision(key), document) for key, document, _ in self._documents.items())
        self._tenants.advance(terms, self._progress_store.take_gained(), now)
        for owned in self._jobs.running():
            owned.holds.over_quota = self._tenants.pacing.reason(owned.document.tenant)
        return AdmissionScene(
            waiting=[one for uid, one in documents.items() if uid not in places and self._waits(one)],
            holding=holding,
            since=[self._admitted_at(one, now) for one in holding],
            pools=capacities(self._reports),
            tenants=terms,
            stored=stored_bytes(documents.values(), known),
            now=now,
            progress_of=self._progress_store.of,
        )

    def _revision(self, key: str) -> int:
        entry = self._documents.entry(key)
        return 0 if entry is None else entry.revision

    def _admitted_at(self, document: JobDocument, now: float) -> float:
        """Return when a job was last admitted, unix seconds; `now` if that is not known."""
        owned, progress = self._jobs.of(document).owned, self._progress_store.of(document.ref)
        if owned is not None:
            return owned.times.admitted_at
        return now if progress is None or progress.admitted_at is None else progress.admitted_at

    def _waits(self, document: JobDocument) -> bool:
        job = self._jobs.of(document)
        if job.owned is not None or document.deleted or self._is_deleted(document.ref):
            return False
        if self._progress_store.is_unreadable(document.ref) or job.is_pausing(self._context.now()):
            return False
        progress = self._progress_store.of(document.ref)
        if progress is None or not progress.phase.final:
            return True
        more = progress.phase is Phase.SUCCEEDED and document.spec.training.steps > progress.step
        return more and document.generation > progress.generation

    async def _take(self, document: JobDocument) -> None:
        """Publish that a job is admitted, then start its control loop.

        In this order, the progress names every job that may have written data, even if this process is killed in between. A later
        deletion skips jobs that were never admitted (`Deletion._has_begun`).
        """
        log.info("admitted job %s", document.ref)
        self._jobs.of(document).published = None
        before = self._progress_store.of(document.ref)
        owned = OwnedJob(self._context, document, before, self._shared)
        await self._progress_store.put(self._progress(owned))
        failpoint("orchestrator.admit.after_progress")
        self._jobs.start(owned)

    def _progress(self, owned: OwnedJob) -> Progress:
        return owned.progress_after(self._progress_store.of(owned.document.ref))
