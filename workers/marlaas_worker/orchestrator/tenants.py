"""Tenants' use of the pools: past use, which is kept on the bus, and rates, which their quotas limit.

Past use is written to the bucket `tenants`, so that a restart of the orchestrator does not clear it. It cannot be derived
from the progress of jobs: a tenant may delete its jobs.
"""

import logging
from collections.abc import Mapping

from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.errors import Unreadable
from marlaas_api.fenced import FencedKey
from marlaas_api.messages import PastUses, TenantQuota
from marlaas_api.wire import decode_as, encode
from marlaas_worker.orchestrator.admission import AdmissionQueue, TenantTerms
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.orchestrator.quota import Pacing

WRITE_S = 30.0
"""Time between two writes of past use. An orchestrator that is killed loses at most that much of it, out of hours."""

log = logging.getLogger(__name__)


class TenantUse:
    """Past use and total usage on the bus, and the pauses of tenants that are over a rate."""

    def __init__(self, bus: Bus, queue: AdmissionQueue, progress_store: ProgressStore) -> None:
        self.pacing = Pacing()
        self._bus, self._queue, self._past = bus, queue, queue.past
        self._key: FencedKey | None = None
        self._written_at, self._progress_store, self._is_unread = 0.0, progress_store, False

    async def load(self) -> None:
        """Read what an earlier orchestrator wrote. A past use that cannot be parsed counts as none, and is not overwritten."""
        await self._progress_store.accounts.load()
        self._key = FencedKey(await self._bus.bucket(subjects.TENANTS), subjects.PAST_USE)
        data = await self._key.read()
        try:
            record = decode_as(PastUses, data, f"key {subjects.PAST_USE}") if data else PastUses()
        except Unreadable as error:
            log.error("%s; the past use of tenants counts as none", error)
            record, self._is_unread = PastUses(), True
        else:
            self._is_unread = False
        self._past.use, self._past.at = dict(record.use), record.at or None

    async def save(self, now: float) -> None:
        """Write past use and total usage, each if it has changed and its last write is long enough ago. Raises Overtaken, and errors of the bus."""
        await self._progress_store.accounts.save(self._progress_store.all(), now)
        if 0 <= now - self._written_at < WRITE_S or not self._past.use or self._is_unread or self._key is None:
            return
        record = PastUses(use=dict(self._past.use), at=self._past.at or now)
        await self._key.write(encode(record))
        self._written_at = now

    def note(self, terms: Mapping[str, TenantTerms], now: float) -> None:
        """Note what all jobs have used by now, and decide which tenants pause."""
        self._queue.advance(now)
        quotas = {name: one.quota for name, one in terms.items() if one.quota != TenantQuota()}
        self.pacing.update(quotas, self._progress_store.take_gained(), now)
