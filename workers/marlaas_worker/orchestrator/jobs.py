"""Starts and stops the control loops of the jobs that this orchestrator knows, and cleans up after the jobs' ends.

`KnownJob` has the whole state of a job here, and is dropped as a whole. For jobs that have ended, a round writes the last progress, purges
messages and emits events. The next round repeats the parts that fail.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.errors import MarlaasError
from marlaas_api.failpoints import failpoint
from marlaas_api.fenced import Overtaken
from marlaas_api.messages import JobDocument, JobVerdict, Progress, ReplicaReport, concerns_loop
from marlaas_api.names import JobRef
from marlaas_api.reasons import Reason
from marlaas_api.retries import patiently
from marlaas_worker.orchestrator import reports as job_reports
from marlaas_worker.orchestrator.admission import Admission
from marlaas_worker.orchestrator.episodes import EpisodesTooLarge
from marlaas_worker.orchestrator.owned_job import OwnedJob
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.orchestrator.retention import Retention
from marlaas_worker.reporter import EventEmitter
from marlaas_worker.role import RoleContext

MAX_CRASHES = 3
"""Unexpected errors of a job's loop, without a finished step in between, after which the job fails.

A single error may be transient; one that the job's records cause recurs after every restart.
"""
CRASH_PAUSE_S = 1.0
PURGE_S = 1.0

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class KnownJob:
    """All that is kept of a job between two rounds, from its first document until the document is gone and nothing is left to do.

    Attributes:
        ref: namespace, name and uid of the job.
        document: the last document that could be parsed; None once the job is gone.
        owned: its control loop; None before the loop's start, and once the loop's last progress is written.
        task: the asyncio task of the control loop; None if there is no loop.
        is_stopped: whether the loop was stopped early, so that an error of its task does not count.
        published: the job's document and the last decision on it that was published since it waits; None if there is none.
        crashes: number of unexpected errors of the loop at `crash_step`.
        crash_step: number of finished steps at the last unexpected error; -1 before the first error.
        crashed_at: time of the last unexpected error, unix seconds.
        is_over: whether the tasks of the ended or deleted job are still to be purged from the queue.
        last: the job's last progress, for an event that is still to be emitted; None if there is no such event.
        turn_bytes: bytes of its recorded turns, as the replicas reported them at the last purge after its end.
        retention: purges its turns after its end; None once that is done.
    """

    ref: JobRef
    document: JobDocument | None = None
    owned: OwnedJob | None = None
    task: "asyncio.Task[None] | None" = None
    is_stopped: bool = False
    published: tuple[JobDocument, Admission] | None = None
    crashes: int = 0
    crash_step: int = -1
    crashed_at: float = 0.0
    is_over: bool = False
    last: Progress | None = None
    turn_bytes: int = 0
    retention: Retention | None = None

    @property
    def is_done(self) -> bool:
        """Whether the job's document is gone, and nothing is left to do for it."""
        return self.document is None and self.owned is None and self.retention is None and not self.is_over

    def is_pausing(self, now: float) -> bool:
        """Return whether the pause after its loop's last crash still lasts. A clock that was set back shortens the pause."""
        return self.crashes > 0 and 0 <= now - self.crashed_at < CRASH_PAUSE_S

    def may_restart(self, num_finished: int, now: float) -> bool:
        """Count a crash of the job's loop; return whether the loop may be restarted.

        Args:
            num_finished: number of the job's finished steps.
            now: unix seconds.
        """
        self.crashes = self.crashes + 1 if self.crash_step == num_finished else 1
        self.crash_step, self.crashed_at = num_finished, now
        return self.crashes < MAX_CRASHES

    def has_published(self, document: JobDocument, admission: Admission) -> bool:
        """Return whether this decision was published for this very document."""
        return self.published is not None and self.published[0] is document and self.published[1] == admission


class Jobs:
    """The jobs that this orchestrator knows. Starts and stops their control loops, and cleans up after their ends.

    Methods that write raise Overtaken and errors of the bus. The next call does what was not done then. Until it succeeds, the caller
    must not admit jobs: a job that has ended may still be admitted by its stored progress, and would be started again.

    Args:
        context: has the bus and the clock.
        progress_store: progress of all jobs.
        reports: returns the latest reports of all replicas.
        changed: called when a job's loop has ended.
    """

    def __init__(
        self,
        context: RoleContext,
        progress_store: ProgressStore,
        reports: Callable[[], list[ReplicaReport]],
        changed: Callable[[], None],
    ) -> None:
        self._context, self._progress_store, self._reports, self._changed = context, progress_store, reports, changed
        self._jobs: dict[str, KnownJob] = {}
        self._running: dict[str, KnownJob] = {}

    @property
    def num_running(self) -> int:
        """Number of jobs with a control loop."""
        return len(self._running)

    def running(self) -> Iterator[OwnedJob]:
        """Yield the control loops that exist at the call; the caller may stop them while it iterates."""
        return iter([job.owned for job in self._running.values() if job.owned is not None])

    def of(self, document: JobDocument) -> KnownJob:
        """Return the `KnownJob` of a job, which is created at the first call."""
        return self._jobs.setdefault(document.uid, KnownJob(document.ref))

    def wake(self, key: str) -> None:
        """Run the next iteration of a job's loop at once. key: `<namespace>.<job>`."""
        if (job := self._running.get(key)) is not None and job.owned is not None:
            job.owned.wake.set()

    def take_moved(self) -> list[OwnedJob]:
        """Return the control loops that have run an iteration since the last call, except those that have ended."""
        moved = [owned for owned in self.running() if owned.moved and owned.ended is None]
        for owned in moved:
            owned.moved = False
        return moved

    async def begin(self, last_turn: int) -> None:
        """Take over the jobs that had ended before this orchestrator began: purge their tasks, and have their turns purged.

        last_turn: last sequence of the stream TURNS.
        """
        for progress in self._progress_store.all():
            if progress.phase.final:
                job = self._jobs[progress.uid] = KnownJob(progress.ref)
                # A killed orchestrator may not have purged them.
                await self._context.bus.purge(subjects.TASKS, subjects.task(job.ref.namespace, job.ref.name))
                self._mark_turns(job, last_turn)

    async def update(self, documents: Mapping[str, JobDocument]) -> None:
        """Pass changed documents to running jobs; stop those that must stop, or whose loop must restart. documents: by uid."""
        for document in documents.values():
            self.of(document).document = document
        for uid, job in list(self._jobs.items()):
            if uid not in documents:
                job.document = None
                if job.is_done:
                    del self._jobs[uid]
        for job in list(self._running.values()):
            if (owned := job.owned) is None or job.document is owned.document:
                continue
            if job.document is None or stops(job.document) or concerns_loop(owned.document, job.document):
                await self.stop(job)
            else:
                owned.revise(job.document)
        await self.write_ends()

    def start(self, owned: OwnedJob) -> None:
        """Start the control loop of a job as an asyncio task. owned: the loop, not started yet."""
        job = self.of(owned.document)
        job.owned, job.is_stopped = owned, False
        job.task = asyncio.create_task(owned.run(), name=f"job {job.ref}")
        job.task.add_done_callback(lambda _: self._changed())
        self._running[job.ref.key] = job

    async def stop(self, job: KnownJob) -> None:
        """Stop the loop of a job. Its last progress is written by `write_ends`, unless the job is detached before."""
        if job.task is not None:
            job.is_stopped = True
            job.task.cancel()
            await asyncio.gather(job.task, return_exceptions=True)

    async def stop_all(self) -> None:
        """Cancel the control loops of all jobs, and wait for their end. Progress stays as it is: the next orchestrator resumes the jobs."""
        await asyncio.gather(*(self.stop(job) for job in self._running.values()))

    def detach(self, job: KnownJob) -> None:
        """Drop the loop of a job, which has ended or was stopped, and release the job's space in the stream TURNS."""
        if job.owned is not None:
            job.owned.release_space()
        job.owned = job.task = None
        if self._running.get(job.ref.key) is job:
            del self._running[job.ref.key]

    async def write_ends(self) -> None:
        """Write the last progress of the jobs whose control loop has ended or was stopped, and drop these loops."""
        for job in list(self._running.values()):
            if job.owned is None or job.task is None or not job.task.done():
                continue
            error = None if job.is_stopped or job.task.cancelled() else job.task.exception()
            await self._write_end(job, job.owned, error)
            job.is_over |= job.document is None
            self.detach(job)

    async def fail(self, document: JobDocument, why: JobVerdict) -> None:
        """Write the progress of a job as failed, and mark its tasks and turns to be purged. why: reason and message of the failure."""
        before = self._progress_store.of(document.ref)
        await self._end(self.of(document), job_reports.failed(document, before, why, self._context.now()))

    async def finish(self) -> None:
        """Purge the tasks of jobs that have ended or are gone, and emit their last events."""
        for job in [job for job in self._jobs.values() if job.is_over]:
            namespace, name = job.ref.namespace, job.ref.name
            await self._context.bus.purge(subjects.TASKS, subjects.task(namespace, name))
            if job.last is not None:
                await EventEmitter(self._context, "orchestrator").emit(job.ref, job.last.reason, job.last.message)
            job.is_over, job.last = False, None

    async def purge_late_turns(self) -> None:
        """Purge again the turns of ended jobs for which the replicas report other totals than at the last purge.

        A play that was given up can record a turn after its job has ended.
        """
        recorded = Counter[str]()
        for report in self._reports():
            recorded.update(report.job_turn_bytes)
        late = (job for job in self._jobs.values() if job.turn_bytes != recorded[job.ref.uid])
        if moved := [job for job in late if job.document is not None and self._progress_store.has_ended(job.ref)]:
            last_turn = (await self._context.bus.state(subjects.TURNS)).last_sequence
            for job in moved:
                job.turn_bytes = recorded[job.ref.uid]
                self._mark_turns(job, last_turn)

    async def purge_turns(self) -> None:
        """Purge the turns of ended jobs, until cancelled. If a recorder of `marlaas run` reads a job, it gets time to read its last episodes."""
        while True:
            await patiently(self.purge_once, "purging the turns of ended jobs", PURGE_S)
            await asyncio.sleep(PURGE_S)

    async def purge_once(self) -> None:
        """Purge the turns of ended jobs that may be purged now."""
        for job in list(self._jobs.values()):
            left = job.retention
            if left is not None and await left.purge(at_once=True) and job.retention is left:  # not a newer mark
                job.retention = None

    async def _write_end(self, job: KnownJob, owned: OwnedJob, error: BaseException | None) -> None:
        """Handle the end of a job's task. An error ends or restarts only this job, except Overtaken, which is raised.

        For a job that was stopped early, write the progress that contains its last recorded steps.
        """
        progress = owned.progress()
        if isinstance(error, Exception) and not isinstance(error, Overtaken):
            await self._crashed(job, owned, error)
        elif error is not None:
            raise error
        elif progress is not None and owned.ended is not None:
            await self._end(job, progress)
        elif progress is not None and self._progress_store.of(job.ref) is not None:
            await self._progress_store.put(progress)

    async def _crashed(self, job: KnownJob, owned: OwnedJob, error: Exception) -> None:
        """Fail a job after an error. After an unexpected error the job may be restarted, since all its state is on record."""
        document, words = owned.document, str(error)
        progress = owned.progress_after(self._progress_store.of(document.ref))
        log.error("the task of job %s crashed", document.ref, exc_info=error)
        if not isinstance(error, MarlaasError | AssertionError):
            if job.may_restart(progress.step, self._context.now()):
                return
            words = f"the job's control loop crashed {MAX_CRASHES} times in a row; the last error: {error!r}"
        reason = Reason.INVALID_ENVIRONMENT if isinstance(error, EpisodesTooLarge) else Reason.BROKEN_INVARIANT
        await self._progress_store.put(progress)
        await self.fail(document, JobVerdict(reason=reason, message=words))

    async def _end(self, job: KnownJob, progress: Progress) -> None:
        turns = await self._context.bus.state(subjects.TURNS)
        await self._progress_store.put(progress)
        failpoint("orchestrator.end.after_progress")
        job.is_over, job.last = True, progress
        self._mark_turns(job, turns.last_sequence)

    def _mark_turns(self, job: KnownJob, last_turn: int) -> None:
        job.retention = Retention(self._context.bus, job.ref, self._context.now)
        job.retention.mark_end(last_turn + 1)


def stops(document: JobDocument) -> bool:
    """Return whether a job with this document must not run.

    It must not run if it is deleted or suspended, its pods are refused at present (`is_held`), or it must end as failed (`verdict`).
    """
    return document.deleted or document.spec.suspend or document.is_held or document.verdict is not None
