"""The orchestrator's control loop: lease, job documents, admission, jobs, `progress`, and deletions."""

import asyncio
import logging
from collections.abc import Container
from typing import Any

from marlaas_api import subjects
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import BusUnavailable
from marlaas_api.failpoints import failpoint
from marlaas_api.fenced import Overtaken
from marlaas_api.messages import JobDocument, Phase, PolicyRecord, Progress, ReplicaReport, concerns_loop
from marlaas_api.reasons import Reason
from marlaas_api.retries import patiently
from marlaas_worker.orchestrator import reports as job_reports
from marlaas_worker.orchestrator.admission import AdmissionQueue
from marlaas_worker.orchestrator.admission_inputs import AdmissionInputs
from marlaas_worker.orchestrator.deletion import Deletions, Doomed
from marlaas_worker.orchestrator.job_ends import JobEnds
from marlaas_worker.orchestrator.lease import RENEW_S, LeaderLease
from marlaas_worker.orchestrator.metrics import samples
from marlaas_worker.orchestrator.owned_job import OwnedJob
from marlaas_worker.orchestrator.progress_store import ProgressStore, PublishedAdmissions
from marlaas_worker.orchestrator.records import Records, SharedState
from marlaas_worker.orchestrator.room import Room
from marlaas_worker.orchestrator.running_jobs import RunningJobs
from marlaas_worker.orchestrator.tenants import TenantUse
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
    def __init__(self, context: RoleContext, lease: LeaderLease) -> None:
        self._context = context
        self._lease = lease
        self._changed = asyncio.Event()
        self._jobs = BucketCache(lambda: context.bus.bucket(subjects.JOBS), JobDocument, lambda _: self._changed.set())
        self._policies = BucketCache(lambda: context.bus.bucket(subjects.POLICY), PolicyRecord, self._wake_job_of)
        bucket = lambda: context.bus.bucket(subjects.REPLICAS)  # noqa: E731
        self._replicas = BucketCache(bucket, ReplicaReport, lambda _: self._changed.set())
        store = self._progress_store = ProgressStore(context.bus)
        self._reports: list[ReplicaReport] = []
        self._deletions = Deletions(context, self._progress_store, lambda: self._reports, self._changed.set)
        self._running = RunningJobs(self._changed.set)
        self._ends = JobEnds(context, self._progress_store)
        self._queue = AdmissionQueue()
        self._tenants = TenantUse(context.bus, self._queue, self._progress_store)
        self._inputs = AdmissionInputs(context.now, self._jobs, self._progress_store, self._running, self._tenants)
        self._room = Room()
        self._shared = SharedState(lambda: self._reports, self._policies, self._room, lambda: len(self._running))
        self._published = PublishedAdmissions()
        context.metrics.samples = lambda: samples(store.all(), True, store.accounts.totals())

    async def run(self) -> None:
        """Run all jobs; return when the lease is lost or the process is to stop."""
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._lease.keep(), name="lease"),
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
            await end_tasks([*tasks, *self._running.tasks()])
            await self._deletions.end()

    def _wake_job_of(self, policy_key: str) -> None:
        self._running.wake(policy_key.rpartition(".")[0])

    async def _reconcile_for_ever(self) -> None:
        await self._begin()
        async with asyncio.TaskGroup() as beside:
            beside.create_task(self._jobs.follow(), name="follow jobs")
            beside.create_task(self._ends.leftovers.follow(), name="purge turns")
            while True:
                try:
                    await self._reconcile()
                except BusUnavailable as error:
                    log.warning("reconcile failed, NATS does not answer; running jobs are kept: %s", error)
                await asyncio.sleep(PAUSE_S)
                await wait_for(self._changed, PERIOD_S)
                self._changed.clear()

    async def _begin(self) -> None:
        """Read all state once before the first reconcile, so that no decision depends on partial state."""

        async def read() -> None:
            await self._progress_store.load()
            await self._tenants.load()
            await self._jobs.refresh()
            await self._replicas.refresh()
            turns = await self._room.refresh(self._context.bus)
            await self._ends.begin(turns.last_sequence)

        await patiently(read, "reading the first state, nothing is decided yet", PAUSE_S)

    async def _reconcile(self) -> None:
        documents = {document.uid: document for _, document, _ in self._jobs.items()}
        await self._room.refresh(self._context.bus)
        self._reports = [report for _, report, _ in self._replicas.items()]
        self._ends.note(*self._running.take_ended())
        await self._ends.settle()
        await self._ends.finish()
        await self._ends.leftovers.note(self._reports, documents.keys() - self._running.uids())
        await self._apply_documents(documents)
        self._forget(documents)
        await self._displace()
        await self._admit(documents)
        await self._progress_store.put_running([self._progress(owned) for owned in self._running.take_moved()])
        remains = lambda ref: None if self._deletions.concerns(ref) else self._progress_store.of(ref)  # noqa: E731
        await self._progress_store.put_all(self._ends.late_use.of(remains, self._reports, self._context.now()))
        await self._tenants.save(self._context.now())
        await self._ends.finish()

    async def _apply_documents(self, documents: dict[str, JobDocument]) -> None:
        """Cancel jobs that must stop or whose loop must restart; pass changed documents to the other running jobs."""
        for owned in self._running:
            document = documents.get(owned.document.uid)
            if document is None or _stops(document) or concerns_loop(owned.document, document):
                self._ends.note((owned, None))  # before the stop, which removes it
                await self._running.stop(owned)
                await self._ends.settle()
                if document is None:
                    self._ends.gone(owned.document)
            elif document is not owned.document:
                owned.revise(document)

    async def _displace(self) -> None:
        """Queue the preempted jobs that have stopped at a step boundary. Their tasks are issued again after the next admission.

        Their progress is written after their loop was cancelled: a kill in between leaves them admitted.
        """
        for owned in self._running:
            if owned.has_given_way:
                document, progress, why = owned.document, self._progress(owned), owned.stops.gives_way
                await self._running.stop(owned)
                log.info("preempted job %s: %s", document.ref, why)
                await self._progress_store.put(job_reports.preempted(document, progress, await owned.cut_plays(), why))
                failpoint("orchestrator.preempt.after_progress")
                self._queue.left(document)
                records = Records(self._context, document)
                await records.forget_tasks()
                await records.emit(Reason.PREEMPTED, why)

    def _forget(self, documents: dict[str, JobDocument]) -> None:
        """Start the deletion of deleted jobs, and of earlier jobs whose name a later job has taken."""
        self._deletions.settle()
        for document in documents.values():
            if self._progress_store.is_unreadable(document.ref):
                continue
            earlier = self._progress_store.earlier(document.ref)
            if earlier is not None:
                self._deletions.begin(Doomed.by_progress(earlier))
            elif document.deleted:
                self._deletions.begin(Doomed.by_document(document))
        self._published.keep(documents)
        self._ends.restarts.keep(documents)
        self._room.keep(self._running.uids())

    async def _admit(self, documents: dict[str, JobDocument]) -> None:
        """Start the loops of admitted jobs, whether or not their pool offers the slots now; then decide on waiting jobs."""
        holding = [one for one in documents.values() if self._progress_store.is_admitted(one.ref) and not _stops(one)]
        for document in documents.values():
            if document.verdict is not None and self._waits(document):
                await self._ends.fail(document, document.verdict)
        for document in holding:
            if self._waits(document):
                await self._take(document)
        scene = self._inputs.scene(documents, [*holding, *self._unreadable_jobs(documents)], self._waits, self._reports)
        decision = self._queue.decide(scene)
        waiting = [one for one in documents.values() if one.uid in decision.admissions]
        for document in waiting:
            if decision.admissions[document.uid].admitted and document.uid not in self._running:
                await self._take(document)
                self._queue.entered(document)
        for owned in self._running:
            owned.give_way(decision.preempted.get(owned.document.uid, ""))
        queued = self._published.missing(waiting, decision.admissions)
        before = self._progress_store.of
        await self._progress_store.put_all(job_reports.queued(one, before(one.ref), why) for one, why in queued)
        self._published.note(queued)

    def _unreadable_jobs(self, documents: Container[str]) -> list[JobDocument]:
        """Return the last documents of running jobs whose new document cannot be read."""
        return [owned.document for owned in self._running if owned.document.uid not in documents]

    def _waits(self, document: JobDocument) -> bool:
        if document.uid in self._running or document.deleted or self._deletions.concerns(document.ref):
            return False
        if self._progress_store.is_unreadable(document.ref):
            return False
        if self._ends.restarts.is_pausing(document.uid, self._context.now()):
            return False
        progress = self._progress_store.of(document.ref)
        if progress is None or not progress.phase.final:
            return True
        more = progress.phase is Phase.SUCCEEDED and document.spec.training.steps > progress.step
        return more and document.generation > progress.generation

    async def _take(self, document: JobDocument) -> None:
        """Publish that a job is admitted, then start its loop; a deletion must find a job that has started."""
        log.info("admitted job %s", document.ref)
        self._published.forget(document.uid)
        before = self._progress_store.of(document.ref)
        owned = OwnedJob(self._context, document, before, self._shared)
        await self._progress_store.put(self._progress(owned))
        failpoint("orchestrator.admit.after_level")
        self._running.start(owned)

    def _progress(self, owned: OwnedJob) -> Progress:
        return owned.progress_after(self._progress_store.of(owned.document.ref))


def _stops(document: JobDocument) -> bool:
    return document.deleted or document.spec.suspend or document.is_held or document.verdict is not None
