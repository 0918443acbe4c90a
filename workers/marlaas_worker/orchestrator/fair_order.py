"""The order in which waiting jobs are admitted: by the tenants' shares of the pools and their past use. No I/O and no clock.

Tenants are served by their share after admission, then by past use over weight, then by the age of their next job.
Within a tenant, jobs go by priority, then age; `priority` never moves another tenant's job.

A tenant's share is that of its largest resource over all pools, divided by its weight (dominant resource fairness, NSDI'11). Past use is
the share before division, integrated over time and halved every half hour. An admission adds a minute of the job's share at once, so
that a tenant gains nothing by jobs that end quickly, or by many that are submitted together.

A large job does not starve. In each pool, the next job of the tenant with the smallest share *before* admission is
guarded: other jobs are admitted only if they cannot delay it. The same holds for a tenant's first job against the
tenant's later jobs. By the share after admission alone, small jobs would pass a large one for ever.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from marlaas_api.messages import JobDocument
from marlaas_worker.orchestrator.capacity import Amounts, JobDemand, Resource, Space

HALF_LIFE_S = 1800.0
ENTRY_S = 60.0
"""Seconds of its share that a job's admission adds to its tenant's past use."""
_FORGOTTEN = 1e-6
Age = tuple[float, str, str]
_Key = tuple[float, float, Age]


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


def age(document: JobDocument) -> Age:
    """Return the sort key of jobs by creation time; jobs of the same time go by namespace, then name."""
    return document.created_at, document.namespace, document.job


def own_order(demands: Iterable[JobDemand]) -> list[JobDemand]:
    """Return a tenant's jobs in its own order: by priority, then by age."""
    return sorted(demands, key=lambda one: (-one.document.spec.priority, age(one.document)))


@dataclass(slots=True)
class _Line:
    """A tenant's waiting jobs in one pool.

    Attributes:
        jobs: the jobs that are not considered yet, in reverse order: the next one is last.
        first: the first job of the line that was blocked in this round; None if none was yet.
    """

    jobs: list[JobDemand]
    first: JobDemand | None = None

    @property
    def guarded(self) -> JobDemand | None:
        """The job of the line that others must not delay if its tenant is the least served one of the pool; None if there is none."""
        return self.first or (self.jobs[-1] if self.jobs else None)


@dataclass(slots=True)
class FairOrder:
    """One round of admissions: considers the waiting jobs in fair order, and admits those that fit and delay no guarded job.

    A guarded job is one that other jobs must not delay. Each round needs a new object.

    Attributes:
        space: free units of the pools. Each admission changes them.
        holdings: units and shares of the tenants. Each admission changes them.
        past: past use of the tenants.
        weight: returns a tenant's weight.
        is_over_quota: returns whether a tenant's quota refuses a job; it must count the jobs that `admitted` was called for.
        admitted: called with each job that is admitted.
        blocked: jobs that do not fit, or would delay one that waits, in the order in which they were considered.
    """

    space: Space
    holdings: Holdings
    past: PastUse
    weight: Callable[[str], float]
    is_over_quota: Callable[[JobDemand], bool]
    admitted: Callable[[JobDemand], None]
    blocked: list[JobDemand] = field(default_factory=list)
    _lines: dict[tuple[str, str], _Line] = field(default_factory=dict)
    _of_pool: dict[str, list[_Line]] = field(default_factory=dict)
    _guards: dict[str, JobDemand | None] = field(default_factory=dict)

    @property
    def guards(self) -> list[JobDemand]:
        """The guarded jobs, which others must not delay: at most one for each pool."""
        return [guard for guard in self._guards.values() if guard is not None]

    def run(self, waiting: Iterable[JobDemand]) -> None:
        """Admit, in fair order, each waiting job that is within quota, fits, and delays none of the jobs that it must not delay (`_before`).

        Call it at most once.
        """
        self._queue(waiting)
        heap = [(self._key(line.jobs[-1]), number) for number, line in enumerate(self._lines.values())]
        lines = list(self._lines.values())
        heapq.heapify(heap)
        while heap:
            key, number = heapq.heappop(heap)
            line = lines[number]
            if (current := self._key(line.jobs[-1])) > key:  # The tenant was served meanwhile.
                heapq.heappush(heap, (current, number))
                continue
            self._consider(line.jobs.pop(), line)
            if line.jobs:
                heapq.heappush(heap, (self._key(line.jobs[-1]), number))

    def reserve(self, demand: JobDemand) -> None:
        """Count a job's units as held without admitting it: other jobs are preempted for it, and have not stopped yet."""
        self.space.take(demand)
        self.holdings.take(demand)

    def admit(self, demand: JobDemand) -> None:
        """Admit a job without checking free units, quota or the jobs that wait."""
        self.reserve(demand)
        self.admitted(demand)

    def _queue(self, waiting: Iterable[JobDemand]) -> None:
        found: defaultdict[tuple[str, str], list[JobDemand]] = defaultdict(list)
        for demand in waiting:
            found[demand.tenant, demand.pool].append(demand)
        self._lines = {key: _Line(own_order(jobs)[::-1]) for key, jobs in found.items()}
        for (_, pool), line in self._lines.items():
            self._of_pool.setdefault(pool, []).append(line)
        self._guards = {pool: self._guard(pool) for pool in self._of_pool}

    def _consider(self, demand: JobDemand, line: _Line) -> None:
        if self.is_over_quota(demand):
            return
        if self.space.lacks(demand) or any(self.space.delays(demand, one) for one in self._before(demand, line)):
            line.first = line.first or demand
            self.blocked.append(demand)
            return
        self.admit(demand)
        self._guards[demand.pool] = self._guard(demand.pool)

    def _before(self, demand: JobDemand, line: _Line) -> list[JobDemand]:
        """Return the jobs that a job must not delay: the guarded jobs, and the first blocked job of the job's own line.

        If the job is guarded itself, only the guarded jobs that rank before it count. Otherwise two guarded jobs that need each other's
        pool would wait for each other for ever.
        """
        guards = [one for one in self.guards if one is not demand]
        if len(guards) < len(self.guards):
            mine = self._rank(demand, self.holdings.share(demand.tenant))
            guards = [one for one in guards if self._rank(one, self.holdings.share(one.tenant)) < mine]
        return guards if line.first in (None, demand) else [*guards, line.first]

    def _guard(self, pool: str) -> JobDemand | None:
        """Return the guarded job of a pool; None if there is none.

        Each line of the pool proposes one job (`_Line.guarded`). Of those that are within quota, the job of the least served tenant is guarded.
        """
        return min(
            (one for line in self._of_pool[pool] if (one := line.guarded) is not None and not self.is_over_quota(one)),
            key=lambda one: self._rank(one, self.holdings.share(one.tenant)),
            default=None,
        )

    def _key(self, demand: JobDemand) -> _Key:
        return self._rank(demand, self.holdings.share_after(demand))

    def _rank(self, demand: JobDemand, share: float) -> _Key:
        return share, self.past.of(demand.tenant) / self.weight(demand.tenant), age(demand.document)
