"""The values on which a plan of `paging` depends, collected from the proven versions, the waiting requests and the failed loads."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from marlaas_api.names import AdapterRef, AgentRef
from marlaas_worker.rollout.load_retries import Retries
from marlaas_worker.rollout.paging import PageDemand, Resident, Urgency, order_waits
from marlaas_worker.rollout.slots import ProvenVersions

IN_USE_S = 60.0
"""An agent counts as in use for so long after its last request."""


class PagingInputs:
    """Returns the wanted versions, and the demands and residents that `plan_pages` takes. The caller passes the clock, in seconds.

    usage: returns a tenant's usage, as in `fair_queue`.
    """

    def __init__(self, proven: ProvenVersions, retries: Retries, usage: Callable[[str], float]) -> None:
        self._proven, self._retries, self._usage = proven, retries, usage
        self._used_at: dict[AgentRef, float] = {}

    def wanted(self, now: float) -> dict[str, AdapterRef]:
        """Return the versions that requests wait for, in their order, then the newest ones, last used first."""
        waits, newest = self._proven.waits, self._proven.newest
        for agent in self._used_at.keys() - newest.keys():
            del self._used_at[agent]
        own = (ref for agent, ref in newest.items() if agent not in self._proven.elsewhere)
        last_used_first = sorted(own, key=lambda ref: -self._used_at.get(ref.agent_ref, 0.0))
        waiting = (waits.adapter(wait.name) for wait in order_waits(waits, self._usage))
        refs = [*(ref for ref in waiting if self.is_committed(ref)), *last_used_first]
        return {ref.engine_name: ref for ref in refs if self._retries.may_try(ref.engine_name, now)}

    def is_committed(self, adapter: AdapterRef) -> bool:
        """Return False if a version is known not to be committed yet. A strict job's groups are pinned before that."""
        newest = self._proven.newest.get(adapter.agent_ref)
        return newest is None or adapter.version <= newest.version

    def next_retry_s(self, now: float) -> float | None:
        """Return the seconds until a failed load is tried again; None if no version waits for that."""
        waits = (wait.name for wait in self._proven.waits)
        wanted = {*waits, *(ref.engine_name for ref in self._proven.newest.values())}
        return self._retries.next_in_s(wanted, now)

    def residents(self, adapters: Mapping[str, AdapterRef], now: float) -> list[Resident]:
        """Return the versions that have slots. adapters: by name. Also note when the agent of each was last in use."""
        return [self._describe(one, adapters[one.name], now) for one in self._proven.table.residents()]

    def demands(self, adapters: Iterable[AdapterRef], now: float) -> list[PageDemand]:
        """Return the demands of versions without slots."""
        waiting = {wait.name for wait in self._proven.waits}
        return [self._demand(adapter, adapter.engine_name in waiting, now) for adapter in adapters]

    def _describe(self, resident: Resident, adapter: AdapterRef, now: float) -> Resident:
        """Add the facts that the slot table does not know."""
        agent, proven = adapter.agent_ref, self._proven
        if agent in proven.newest and resident.used_at > resident.loaded_at:
            self._used_at[agent] = max(self._used_at.get(agent, 0.0), resident.used_at)
        is_newest = proven.newest.get(agent) == adapter and agent not in proven.elsewhere
        is_called = proven.past.may_call(adapter, now)
        return replace(
            resident,
            is_current=is_newest or is_called,
            is_strict=agent in proven.strict and not is_called,
            usage=self._usage(proven.tenant_of(adapter)),
            has_served=proven.has_served(adapter),
            is_yielding=proven.is_yielding(resident.name),
        )

    def _demand(self, adapter: AdapterRef, is_waiting: bool, now: float) -> PageDemand:
        is_in_use = now - self._used_at.get(adapter.agent_ref, -IN_USE_S) < IN_USE_S
        # Once only: versions that no request uses would otherwise take the slots from each other for ever.
        is_first = not self._proven.was_proven(adapter)
        urgency = Urgency.SUCCESSOR if is_in_use and is_first else Urgency.PREFETCH
        urgency = Urgency.WAITING if is_waiting else urgency
        usage = self._usage(self._proven.tenant_of(adapter))
        return PageDemand(adapter.engine_name, urgency, self._proven.has_served(adapter), usage)
