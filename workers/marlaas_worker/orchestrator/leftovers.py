"""Turns of jobs that have ended: purged once the recorder of `marlaas run`, if there is one, has read the last episodes.

Crash-safe: the progress keys say which jobs have ended, and an orchestrator that starts looks at all of them.
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
    """Jobs whose turns are to be purged. now: unix seconds."""

    def __init__(self, bus: Bus, now: Callable[[], float]) -> None:
        self._bus, self._now = bus, now
        self._jobs: dict[JobRef, Retention] = {}

    def ended(self, last_sequence: int, *jobs: JobRef) -> None:
        """Jobs have ended: what is in TURNS up to a sequence is of no use to them."""
        for ref in jobs:
            self._jobs[ref] = Retention(self._bus, ref, self._now)
            self._jobs[ref].ended(last_sequence + 1)

    async def follow(self) -> None:
        """Purge, until cancelled."""
        while True:
            try:
                await self.look()
            except Retryable as error:
                log.info("turns of ended jobs are not purged yet: %s", error)
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Purge what may be now. Raises as the bus does."""
        for ref, retention in list(self._jobs.items()):
            if await retention.purge(at_once=True):
                self._jobs.pop(ref, None)
