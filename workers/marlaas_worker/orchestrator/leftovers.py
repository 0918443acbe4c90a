"""Purges the turns of jobs that have ended.

If `marlaas run` has a recorder for the job, the purge waits until it has read the last episodes. Crash-safe:
the progress keys show which jobs have ended, and an orchestrator checks all of them when it starts.
"""

import asyncio
import logging
from collections.abc import Callable

from marlaas_api.bus import Bus
from marlaas_api.errors import Retryable
from marlaas_api.names import JobRef
from marlaas_worker.orchestrator.retention import Retention

PERIOD_S = 1.0
log = logging.getLogger(__name__)


class Leftovers:
    """Jobs whose turns are to be purged. now: returns unix seconds."""

    def __init__(self, bus: Bus, now: Callable[[], float]) -> None:
        self._bus, self._now = bus, now
        self._jobs: dict[JobRef, Retention] = {}

    def ended(self, last_sequence: int, *jobs: JobRef) -> None:
        """Note jobs that have ended: they no longer need their turns up to `last_sequence` of TURNS."""
        for ref in jobs:
            self._jobs[ref] = Retention(self._bus, ref, self._now)
            self._jobs[ref].ended(last_sequence + 1)

    async def follow(self) -> None:
        """Purge the turns of ended jobs, until cancelled."""
        while True:
            try:
                await self.look()
            except Retryable as error:
                log.info("turns of ended jobs are not purged yet: %s", error)
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Purge the turns that may be purged now. Raises errors of the bus."""
        for ref, retention in list(self._jobs.items()):
            if await retention.purge(at_once=True):
                self._jobs.pop(ref, None)
