"""Cache of the bucket `progress`. Only the holder of the lease writes to the bucket, so the cache is exact."""

import asyncio
import logging
from collections.abc import Iterable

from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.errors import Unreadable
from marlaas_api.failpoints import failpoint
from marlaas_api.fenced import FencedKeys
from marlaas_api.messages import Progress
from marlaas_api.names import JobRef
from marlaas_api.wire import decode_as, encode
from marlaas_worker.orchestrator.reports import dated
from marlaas_worker.orchestrator.tenants import TenantAccounts

MAX_WRITES = 32
COUNTERS_S = 1.0
"""Shortest time between two writes of a job's counters, since every replica reads each write. Changes of DECISIONS are written at once."""
DECISIONS = (
    "generation",
    "phase",
    "admitted",
    "reason",
    "step",
    "steps",
    "versions",
    "promoted",
    "adapters",
    "eval_before",
    "eval_last",
    "finished_at",
)

log = logging.getLogger(__name__)


class ProgressStore:
    """Caches and writes the progress of all jobs, their last published state, in the bucket `progress`.

    accounts: total usage of the tenants, which is kept after a job's progress is deleted.

    Methods that write raise Overtaken and errors of the bus; a failed write does not change the cache.
    """

    def __init__(self, bus: Bus) -> None:
        self._keys = FencedKeys(bus, subjects.PROGRESS)
        self._known: dict[str, Progress] = {}
        self._unreadable: set[str] = set()
        self._gained: dict[str, tuple[float, float]] = {}
        self._writes = asyncio.Semaphore(MAX_WRITES)
        self.accounts = TenantAccounts(bus)

    async def load(self) -> None:
        """Read the progress and accounts that an earlier orchestrator wrote. Progress that cannot be parsed is left as it is (`is_unreadable`)."""
        await self.accounts.load()
        self._known, self._unreadable = {}, set()
        for entry in await self._keys.entries():
            try:
                self._known[entry.key] = decode_as(Progress, entry.data or b"", f"the Progress of key {entry.key}")
            except Unreadable as error:
                log.error("%s; the job waits for an orchestrator that can read it", error)
                self._unreadable.add(entry.key)

    def is_unreadable(self, ref: JobRef) -> bool:
        """Return whether the stored progress of a job of this name cannot be parsed. Such a job is not started, and its data is not deleted."""
        return ref.key in self._unreadable

    def all(self) -> Iterable[Progress]:
        """Return the progress of every job."""
        return self._known.values()

    def of(self, ref: JobRef) -> Progress | None:
        """Return the job's progress; None if none was written yet."""
        progress = self._known.get(ref.key)
        return progress if progress is not None and progress.uid == ref.uid else None

    def is_admitted(self, ref: JobRef) -> bool:
        """Return whether the job is admitted and has not ended, by its stored progress, which an earlier orchestrator may have written."""
        progress = self.of(ref)
        return progress is not None and progress.admitted and not progress.phase.final

    def has_ended(self, ref: JobRef) -> bool:
        """Return whether the job has ended, and was not admitted since."""
        progress = self.of(ref)
        return progress is not None and progress.phase.final

    def earlier(self, ref: JobRef) -> Progress | None:
        """Return the progress of an earlier job of the same name; None if there is none."""
        progress = self._known.get(ref.key)
        return progress if progress is not None and progress.uid != ref.uid else None

    async def put(self, progress: Progress) -> None:
        """Write a job's progress, unless only `at` has changed."""
        before = self.of(progress.ref)
        if before is not None and before.model_copy(update={"at": progress.at}) == progress:
            return
        async with self._writes:
            await self._keys.write(progress.ref.key, encode(progress))
        self._known[progress.ref.key] = progress
        self._gain(before, progress)

    def take_gained(self) -> dict[str, tuple[float, float]]:
        """Return, by tenant, the charged tokens and trainer seconds by which the progress of its jobs has grown since the last call."""
        gained, self._gained = self._gained, {}
        return gained

    def _gain(self, before: Progress | None, progress: Progress) -> None:
        tokens, trainer_s = self._gained.get(progress.tenant, (0.0, 0.0))
        tokens += progress.amounts.charged_tokens - (before.amounts.charged_tokens if before else 0)
        trainer_s += max(0.0, progress.trainer_s - (before.trainer_s if before else 0.0))
        self._gained[progress.tenant] = tokens, trainer_s

    async def put_all(self, all_progress: Iterable[Progress]) -> None:
        """Write the progress of many jobs concurrently. Raises the first error, after all writes were tried."""
        results = await asyncio.gather(*(self.put(progress) for progress in all_progress), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def put_running(self, all_progress: Iterable[Progress]) -> None:
        """Write the progress of running jobs. If only counters have changed, write it at most once in COUNTERS_S seconds. Raises as `put_all`."""
        running = (dated(progress, self.of(progress.ref)) for progress in all_progress)
        await self.put_all([progress for progress in running if self._is_due(progress)])

    def _is_due(self, progress: Progress) -> bool:
        before = self.of(progress.ref)
        if before is None or progress.at - before.at >= COUNTERS_S:
            return True
        return any(getattr(before, name) != getattr(progress, name) for name in DECISIONS)

    async def delete(self, ref: JobRef) -> None:
        """Add a job's usage to its tenant's account, and delete its progress. Do nothing if the stored progress is that of another job."""
        progress = self.of(ref)
        if progress is not None:
            await self.accounts.close(progress, {one.uid for one in self._known.values()})
            failpoint("orchestrator.delete.after_usage")
            await self._keys.delete(ref.key)
            del self._known[ref.key]
