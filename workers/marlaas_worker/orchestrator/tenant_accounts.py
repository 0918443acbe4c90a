"""Usage of each tenant since its first job, kept on the bus. It includes deleted jobs, which leave nothing else behind."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping

from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.errors import Unreadable
from marlaas_api.fenced import FencedKeys
from marlaas_api.messages import Progress, TenantUsage, UsageAmounts
from marlaas_api.messages.usage import total
from marlaas_api.names import DEFAULT_TENANT
from marlaas_api.wire import decode_as, encode

WRITE_S = 10.0
"""Time between two writes of the totals. A kill loses none of them: they are summed from the progress of all jobs."""

log = logging.getLogger(__name__)


class TenantAccounts:
    """The usage of all tenants. Methods that read or write raise Overtaken and errors of the bus; a failed write changes nothing here."""

    def __init__(self, bus: Bus) -> None:
        self._keys = FencedKeys(bus, subjects.TENANTS)
        self._known: dict[str, TenantUsage] = {}
        self._unreadable: dict[str, Unreadable] = {}
        self._written_at = 0.0
        self._writes = asyncio.Lock()

    async def load(self) -> None:
        """Read what an earlier orchestrator wrote. A record that cannot be parsed is never overwritten."""
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
        """Add a job to its tenant's removed jobs, before its progress is deleted. May be repeated.

        Args:
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
        """Write the totals that have changed, if the last write is long enough ago. now: unix seconds."""
        if 0 <= now - self._written_at < WRITE_S:
            return
        async with self._writes:
            for account in self._changed(all_progress):
                await self._write(account.model_copy(update={"at": now}))
        self._written_at = now

    def _changed(self, all_progress: Iterable[Progress]) -> list[TenantUsage]:
        found = summed(self._known, all_progress)
        readable = (name for name in found if subjects.tenant_usage_key(name) not in self._unreadable)
        return [found[name] for name in readable if found[name].total != self._account(name).total]

    def _account(self, tenant: str) -> TenantUsage:
        return self._known.get(tenant) or TenantUsage(tenant=tenant)

    async def _write(self, account: TenantUsage) -> None:
        await self._keys.write(subjects.tenant_usage_key(account.tenant), encode(account))
        self._known[account.tenant] = account


def summed(accounts: Mapping[str, TenantUsage], all_progress: Iterable[Progress]) -> dict[str, TenantUsage]:
    """Return the accounts by tenant with new totals: of removed jobs, and of the jobs that have a progress."""
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
