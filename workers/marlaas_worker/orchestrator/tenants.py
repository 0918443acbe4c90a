"""Tenants' total usage since their first job, and their past use, kept in the bucket `tenants`. Also decides which tenants are over a rate.

Neither usage nor past use can be derived from the progress of jobs alone: a tenant may delete its jobs, and then nothing else is left of them.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping

from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.errors import Unreadable
from marlaas_api.fenced import FencedKey, FencedKeys
from marlaas_api.messages import PastUses, Progress, TenantQuota, TenantUsage, UsageAmounts
from marlaas_api.messages.usage import total
from marlaas_api.names import DEFAULT_TENANT
from marlaas_api.wire import decode_as, encode
from marlaas_worker.orchestrator.admission import AdmissionQueue, TenantTerms
from marlaas_worker.orchestrator.quota import Pacing

TOTALS_S = 10.0
"""Time between two writes of the totals. A kill loses none of them: they are summed from the progress of all jobs."""
PAST_USE_S = 30.0
"""Time between two writes of past use. If an orchestrator is killed, only the use of that time is lost."""

log = logging.getLogger(__name__)


class TenantAccounts:
    """Each tenant's total usage since its first job, removed jobs included.

    Methods that read or write raise Overtaken and errors of the bus; a failed write does not change the totals here.
    """

    def __init__(self, bus: Bus) -> None:
        self._keys = FencedKeys(bus, subjects.TENANTS)
        self._known: dict[str, TenantUsage] = {}
        self._unreadable: dict[str, Unreadable] = {}
        self._written_at = 0.0
        self._writes = asyncio.Lock()

    async def load(self) -> None:
        """Read the totals that an earlier orchestrator wrote. A record that cannot be parsed is never overwritten."""
        self._known, self._unreadable = {}, {}
        for entry in await self._keys.entries(subjects.TENANT_USAGE):
            try:
                account = decode_as(TenantUsage, entry.data or b"", f"the TenantUsage of key {entry.key}")
            except Unreadable as error:
                log.error("%s; it is not updated", error)
                self._unreadable[entry.key] = error
            else:
                self._known[account.tenant] = account

    def totals(self) -> dict[str, UsageAmounts]:
        """Return the totals as of the last write, by tenant."""
        return {name: account.total for name, account in sorted(self._known.items())}

    async def close(self, progress: Progress, present: Container[str]) -> None:
        """Add a job's usage to that of its tenant's removed jobs, before the job's progress is deleted. A repeated call adds nothing.

        Args:
            progress: of the job.
            present: uids of all jobs that have a progress.

        Raises:
            Unreadable: the account cannot be read; the job's progress must be kept.
        """
        if (error := self._unreadable.get(subjects.tenant_usage_key(_tenant(progress)))) is not None:
            raise error
        async with self._writes:
            account = self._account(_tenant(progress))
            amounts = progress.amounts.closed()
            if progress.uid in account.removing or amounts == UsageAmounts():
                return
            removing = (*(uid for uid in account.removing if uid in present), progress.uid)
            await self._write(account.model_copy(update={"removed": account.removed + amounts, "removing": removing}))

    async def save(self, all_progress: Iterable[Progress], now: float) -> None:
        """Write the totals that have changed, if the last write is at least TOTALS_S seconds ago. now: unix seconds."""
        if 0 <= now - self._written_at < TOTALS_S:
            return
        async with self._writes:
            for name, account in summed(self._known, all_progress).items():
                is_readable = subjects.tenant_usage_key(name) not in self._unreadable
                if is_readable and account.total != self._account(name).total:
                    await self._write(account.model_copy(update={"at": now}))
        self._written_at = now

    def _account(self, tenant: str) -> TenantUsage:
        return self._known.get(tenant) or TenantUsage(tenant=tenant)

    async def _write(self, account: TenantUsage) -> None:
        await self._keys.write(subjects.tenant_usage_key(account.tenant), encode(account))
        self._known[account.tenant] = account


def summed(accounts: Mapping[str, TenantUsage], all_progress: Iterable[Progress]) -> dict[str, TenantUsage]:
    """Return each tenant's account with a new `total`: the sum of the usage of its removed jobs and of its jobs that have a progress.

    Args:
        accounts: present accounts by tenant.
        all_progress: progress of every job.
    """
    present: dict[str, list[UsageAmounts]] = defaultdict(list)
    for progress in all_progress:
        tenant = _tenant(progress)
        if tenant not in accounts or progress.uid not in accounts[tenant].removing:
            present[tenant].append(progress.amounts)
    names = sorted({*accounts, *present})
    known = {name: accounts.get(name) or TenantUsage(tenant=name) for name in names}
    return {
        name: account.model_copy(update={"total": account.removed + total(present[name])})
        for name, account in known.items()
    }


def _tenant(progress: Progress) -> str:
    """Return a job's tenant. Progress of older writers has none, and counts for the default tenant."""
    return progress.tenant or DEFAULT_TENANT


class TenantUse:
    """Reads and writes the tenants' past use on the bus, and decides which tenants' jobs pause because the tenant is over a rate.

    pacing: says whether a tenant's jobs pause. queue: the admission queue, which computes the past use (`queue.past`).
    """

    def __init__(self, bus: Bus, queue: AdmissionQueue) -> None:
        self.pacing = Pacing()
        self._bus, self._queue, self._past = bus, queue, queue.past
        self._key: FencedKey | None = None
        self._written_at, self._is_unread = 0.0, False

    async def load(self) -> None:
        """Read the past use that an earlier orchestrator wrote. A past use that cannot be parsed counts as none, and is not overwritten."""
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
        """Write the past use, if the last write is at least PAST_USE_S seconds ago. now: unix seconds. Raises Overtaken, and errors of the bus."""
        if 0 <= now - self._written_at < PAST_USE_S or not self._past.use or self._is_unread or self._key is None:
            return
        record = PastUses(use=dict(self._past.use), at=self._past.at or now)
        await self._key.write(encode(record))
        self._written_at = now

    def advance(self, terms: Mapping[str, TenantTerms], gained: Mapping[str, tuple[float, float]], now: float) -> None:
        """Add the use since the last call, and decide which tenants pause.

        terms: weight and quota by tenant. gained: by tenant, charged tokens and trainer seconds since the last call. now: unix seconds.
        """
        self._queue.advance(now)
        quotas = {name: one.quota for name, one in terms.items() if one.quota != TenantQuota()}
        self.pacing.update(quotas, gained, now)
