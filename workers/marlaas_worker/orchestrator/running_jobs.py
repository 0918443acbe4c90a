"""The loops of admitted jobs, each in a task of its own."""

import asyncio
from collections.abc import Callable, Iterable, Iterator

from marlaas_worker.orchestrator.owned_job import OwnedJob


class RunningJobs:
    """Admitted jobs by uid. changed: called when the task of a job has ended."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._jobs: dict[str, tuple[OwnedJob, asyncio.Task[None]]] = {}
        self._uids: dict[str, str] = {}

    def __contains__(self, uid: object) -> bool:
        return uid in self._jobs

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[OwnedJob]:
        """Yield the jobs of this moment; they may be stopped meanwhile."""
        return iter([owned for owned, _ in self._jobs.values()])

    def get(self, uid: str) -> OwnedJob | None:
        """Return a job; None if its loop does not run."""
        found = self._jobs.get(uid)
        return found[0] if found is not None else None

    def wake(self, key: str) -> None:
        """Run the next iteration of a job at once. key: `<namespace>.<job>`."""
        found = self._jobs.get(self._uids.get(key, ""))
        if found is not None:
            found[0].wake.set()

    def take_moved(self) -> list[OwnedJob]:
        """Return the jobs that have run an iteration since the last call. Only `take_ended` returns ended jobs."""
        moved = [owned for owned, _ in self._jobs.values() if owned.moved and owned.ended is None]
        for owned in moved:
            owned.moved = False
        return moved

    def uids(self) -> list[str]:
        """Return the uids of all jobs."""
        return list(self._jobs)

    def start(self, owned: OwnedJob) -> None:
        """Start the loop of a job."""
        task = asyncio.create_task(owned.run(), name=f"job {owned.document.ref}")
        task.add_done_callback(lambda _: self._changed())
        self._jobs[owned.document.uid] = (owned, task)
        self._uids[owned.document.ref.key] = owned.document.uid

    async def stop(self, owned: OwnedJob) -> None:
        """Cancel the loop of a job and remove the job."""
        _, task = self._jobs[owned.document.uid]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._remove(owned)

    def take_ended(self) -> Iterable[tuple[OwnedJob, BaseException | None]]:
        """Remove and yield each job whose loop has ended, with the loop's error; None if it ended without one."""
        for owned, task in list(self._jobs.values()):
            if task.done():
                self._remove(owned)
                yield owned, None if task.cancelled() else task.exception()

    def _remove(self, owned: OwnedJob) -> None:
        del self._jobs[owned.document.uid]
        if self._uids.get(owned.document.ref.key) == owned.document.uid:
            del self._uids[owned.document.ref.key]

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return all tasks."""
        return [task for _, task in self._jobs.values()]
