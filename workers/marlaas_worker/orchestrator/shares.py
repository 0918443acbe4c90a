"""Tenants' shares of the pools: what they hold now (dominant resource fairness, NSDI'11), and what they used. Pure.

A tenant's share is that of its largest resource over all pools, divided by its weight. Past use is the share before
division, integrated over time and halved every half hour. An admission adds a minute of the job's share at once, so
that a tenant gains nothing by jobs that end quickly, or by many that are submitted together.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from marlaas_worker.orchestrator.capacity import Amounts, JobDemand, Resource

HALF_LIFE_S = 1800.0
ENTRY_S = 60.0
"""Seconds of its share that a job's admission adds to its tenant's past use."""
_FORGOTTEN = 1e-6


class Holdings:
    """Units of the pools' resources that each tenant holds, and each tenant's share.

    A dominant share is the largest fraction of any resource's total that a tenant holds; the tenant's share is this fraction divided by its weight.

    Args:
        totals: total units of all pools, by resource.
        weights: by tenant; a tenant that is absent has weight 1.
        holding: demands of the admitted jobs.
    """

    def __init__(self, totals: Amounts, weights: Mapping[str, float], holding: Iterable[JobDemand] = ()) -> None:
        self._totals, self._weights = totals, weights
        self._held: dict[str, dict[Resource, int]] = {}
        for demand in holding:
            self.take(demand)

    def copy(self) -> "Holdings":
        """Return an independent copy."""
        copied = Holdings(self._totals, self._weights)
        copied._held = {tenant: dict(held) for tenant, held in self._held.items()}
        return copied

    def take(self, demand: JobDemand, sign: int = 1) -> None:
        """Add the units of an admitted job to those that its tenant holds; with sign -1, subtract them."""
        held = self._held.setdefault(demand.tenant, {})
        for resource, units in demand.need.items():
            held[resource] = held.get(resource, 0) + sign * units

    def dominant(self, tenant: str) -> float:
        """Return a tenant's dominant share, not divided by its weight."""
        held = self._held.get(tenant, {})
        return max((units / self._totals[resource] for resource, units in held.items()), default=0.0)

    def share(self, tenant: str) -> float:
        """Return a tenant's dominant share divided by its weight."""
        return self.dominant(tenant) / self._weights.get(tenant, 1.0)

    def share_after(self, demand: JobDemand) -> float:
        """Return the share that the job's tenant would have after its admission."""
        held = self._held.get(demand.tenant, {})
        more = ((held.get(resource, 0) + units) / self._totals[resource] for resource, units in demand.need.items())
        return max(max(more, default=0.0), self.dominant(demand.tenant)) / self._weights.get(demand.tenant, 1.0)

    def tenants(self) -> list[str]:
        """Return the tenants that hold units, or held some before they were subtracted."""
        return list(self._held)


@dataclass(slots=True)
class PastUse:
    """Past use of the pools by each tenant: its dominant share, integrated over time in seconds, with a half-life of HALF_LIFE_S.

    Attributes:
        use: past use by tenant; 1 is a dominant share of 1 held for one second. A tenant that is absent has 0.
        at: unix seconds up to which the use is computed; None before the first `advance`.
    """

    use: dict[str, float] = field(default_factory=dict)
    at: float | None = None

    def advance(self, now: float, shares: Mapping[str, float]) -> None:
        """Decay the use, and add that of the time since the last call. shares: by tenant, dominant share in that time, not divided by a weight.

        A clock that was set back adds nothing.
        """
        elapsed = max(0.0, now - self.at) if self.at is not None else 0.0
        self.at = now
        kept = math.exp2(-elapsed / HALF_LIFE_S)
        gained = (1 - kept) * HALF_LIFE_S / math.log(2)
        found = {
            tenant: self.use.get(tenant, 0.0) * kept + shares.get(tenant, 0.0) * gained
            for tenant in {*self.use, *shares}
        }
        self.use = {tenant: use for tenant, use in found.items() if use > _FORGOTTEN}

    def enter(self, tenant: str, share: float) -> None:
        """Add ENTRY_S seconds of a job's dominant `share` to its tenant's use, for the job's admission."""
        self.use[tenant] = self.use.get(tenant, 0.0) + share * ENTRY_S

    def refund(self, tenant: str, share: float) -> None:
        """Subtract what `enter` added for a job of this dominant `share` that was preempted: its next admission adds it again."""
        self.use[tenant] = max(0.0, self.use.get(tenant, 0.0) - share * ENTRY_S)

    def of(self, tenant: str) -> float:
        """Return a tenant's past use; 0 if it has none."""
        return self.use.get(tenant, 0.0)
