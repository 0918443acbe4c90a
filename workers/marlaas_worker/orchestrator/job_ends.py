"""Ends of jobs: the last progress of jobs that no longer run, purges and events afterwards, and restarts after errors."""

import logging
from collections import deque

from marlaas_api import subjects
from marlaas_api.errors import MarlaasError
from marlaas_api.failpoints import failpoint
from marlaas_api.fenced import Overtaken
from marlaas_api.messages import JobDocument, JobVerdict, Progress
from marlaas_api.reasons import Reason
from marlaas_worker.orchestrator import reports
from marlaas_worker.orchestrator.episodes import EpisodesTooLarge
from marlaas_worker.orchestrator.owned_job import OwnedJob
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.orchestrator.records import Records
from marlaas_worker.orchestrator.restarts import MAX_CRASHES, JobRestarts
from marlaas_worker.orchestrator.retention import Leftovers
from marlaas_worker.orchestrator.usage import LateUse
from marlaas_worker.role import RoleContext

log = logging.getLogger(__name__)


class JobEnds:
    """Jobs whose loop has ended or was stopped.

    `settle` and `finish` raise errors of the bus. What is not done then is done by the next call. Until then, the caller must
    not admit jobs: progress that says that an ended job is admitted would start it again.

    Attributes:
        leftovers: purges the turns of ended jobs.
        late_use: usage that replicas report after the end of a job.
        restarts: jobs whose loop has crashed and is restarted.
    """

    def __init__(self, context: RoleContext, progress_store: ProgressStore) -> None:
        self._context, self._progress_store = context, progress_store
        self.leftovers, self.late_use = Leftovers(context.bus, context.now), LateUse()
        self.restarts = JobRestarts()
        self._unsettled = deque[tuple[OwnedJob, BaseException | None]]()
        self._unfinished: dict[str, tuple[JobDocument, Progress | None]] = {}

    async def begin(self, last_turn: int) -> None:
        """Take over the jobs that had ended before this orchestrator began. last_turn: last sequence of TURNS."""
        ended = [progress.ref for progress in self._progress_store.all() if progress.phase.final]
        for ref in ended:  # A killed orchestrator may not have purged them.
            await self._context.bus.purge(subjects.TASKS, subjects.task(ref.namespace, ref.name))
        self.late_use.ended(*ended)
        self.leftovers.ended(last_turn, *ended)

    def note(self, *ended: tuple[OwnedJob, BaseException | None]) -> None:
        """Note jobs whose loop has ended or is being stopped, with the error of the loop."""
        self._unsettled.extend(ended)

    def gone(self, document: JobDocument) -> None:
        """Note a job whose document is gone."""
        self._unfinished[document.uid] = (document, None)

    async def settle(self) -> None:
        """Write the last progress of the noted jobs. Raises Overtaken, and errors of the bus."""
        while self._unsettled:
            await self._settle(*self._unsettled[0])
            self._unsettled.popleft()

    async def finish(self) -> None:
        """Purge the tasks of jobs that have ended or are gone, and emit their last events."""
        for uid, (document, progress) in list(self._unfinished.items()):
            records = Records(self._context, document)
            await records.forget_tasks()
            if progress is not None:
                await records.emit(progress.reason, progress.message)
            del self._unfinished[uid]

    async def fail(self, document: JobDocument, why: JobVerdict) -> None:
        """End a job as failed."""
        before = self._progress_store.of(document.ref)
        await self._end_with(document, reports.failed(document, before, why, self._context.now()))

    async def _settle(self, owned: OwnedJob, error: BaseException | None) -> None:
        """Handle the end of a job's task. An error ends or restarts only this job, except Overtaken, which is raised.

        Write the last recorded steps of a job that was stopped early.
        """
        progress = owned.progress()
        if isinstance(error, Exception) and not isinstance(error, Overtaken):
            await self._crashed(owned, error)
        elif error is not None:
            raise error
        elif progress is not None and owned.ended is not None:
            await self._end_with(owned.document, progress)
        elif progress is not None and self._progress_store.of(owned.document.ref) is not None:
            await self._progress_store.put(progress)

    async def _crashed(self, owned: OwnedJob, error: Exception) -> None:
        """Fail a job after an error. After an unexpected error the job may be restarted, since all its state is on record."""
        document, words = owned.document, str(error)
        progress = owned.progress_after(self._progress_store.of(document.ref))
        log.error("the task of job %s crashed", document.ref, exc_info=error)
        if not isinstance(error, MarlaasError | AssertionError):
            if self.restarts.note(document.uid, progress.step, self._context.now()):
                return
            words = f"the job's control loop crashed {MAX_CRASHES} times in a row; the last error: {error!r}"
        reason = Reason.INVALID_ENVIRONMENT if isinstance(error, EpisodesTooLarge) else Reason.BROKEN_INVARIANT
        await self._progress_store.put(progress)
        await self.fail(document, JobVerdict(reason=reason, message=words))

    async def _end_with(self, document: JobDocument, progress: Progress) -> None:
        turns = await self._context.bus.state(subjects.TURNS)
        await self._progress_store.put(progress)
        failpoint("orchestrator.end.after_progress")
        self.late_use.ended(document.ref)
        self.leftovers.ended(turns.last_sequence, document.ref)
        self._unfinished[document.uid] = (document, progress)
