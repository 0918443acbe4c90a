"""Deletions in progress, a few at a time; each is retried until it succeeds."""

import asyncio
import logging
from collections.abc import Callable

from marlaas_api.errors import MarlaasError, Retryable
from marlaas_api.names import JobRef
from marlaas_worker.orchestrator.deletion import MAX_DELETES, Deletion, Doomed, Reports
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.role import RoleContext

RETRY_S = 1.0
REFUSED_S = 15.0

log = logging.getLogger(__name__)


class Deletions:
    """Jobs that are being deleted, by namespace and name. `changed` is called when a deletion ends."""

    def __init__(
        self, context: RoleContext, progress_store: ProgressStore, reports: Reports, changed: Callable[[], None]
    ) -> None:
        self._context, self._progress_store, self._reports, self._changed = context, progress_store, reports, changed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(MAX_DELETES)

    def concerns(self, ref: JobRef) -> bool:
        """Return whether a job of this name is being deleted; until then no other job of that name may begin."""
        return ref.key in self._tasks

    def begin(self, doomed: Doomed) -> None:
        """Start a job's deletion, unless one of that name is in progress."""
        if doomed.ref.key in self._tasks:
            return
        task = asyncio.create_task(self._run(doomed), name=f"delete {doomed.ref}")
        task.add_done_callback(lambda _: self._changed())
        self._tasks[doomed.ref.key] = task

    def settle(self) -> None:
        """Remove finished deletions. Raises their unexpected errors, those that are not MarlaasError."""
        for key, task in list(self._tasks.items()):
            if task.done():
                del self._tasks[key]
                task.result()

    async def end(self) -> None:
        """Cancel all deletions; the next orchestrator repeats them."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, doomed: Doomed) -> None:
        deletion = Deletion(self._context, self._progress_store, self._reports, doomed)
        while True:
            try:
                async with self._places:
                    await deletion.run()
                return
            except Retryable as error:
                log.warning("deleting %s: %s; trying again", doomed.ref, error)
                await asyncio.sleep(RETRY_S)
            except MarlaasError as error:
                log.error("deleting %s: %s; trying again in %g s", doomed.ref, error, REFUSED_S)
                await asyncio.sleep(REFUSED_S)
