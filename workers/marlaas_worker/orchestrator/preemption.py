"""Which running jobs make room for a waiting one. Pure.

A preempts B if the share of A's tenant after A's admission is below the share of B's tenant before B's loss. Both are
shares of this moment: past use does not count, else a pair of jobs could preempt each other for ever. After the
preemption, the share of B's tenant with B would not be below the share of A's tenant with A, so B never preempts A back
while nothing else changes. A job that has run for less than a minute is not preempted, and no job is preempted without
need.

A preemption is an exchange: victims free what the preemptor needs, never what a pool lacks since it became smaller. So no job
is preempted because a pool becomes smaller, for example while one of its replicas restarts.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from marlaas_worker.orchestrator.capacity import JobDemand, Resource
from marlaas_worker.orchestrator.fair_order import FairOrder, age

MIN_RUN_S = 60.0
_SAME = 1e-9


@dataclass(frozen=True, slots=True)
class RunningJob:
    """An admitted job. demand: the job and the units that it holds. since: when it was last admitted, unix seconds."""

    demand: JobDemand
    since: float


@dataclass(frozen=True, slots=True)
class Preemption:
    """A waiting job (`preemptor`), and the running jobs that must stop to make room for it (`victims`)."""

    preemptor: JobDemand
    victims: tuple[JobDemand, ...]


def preemptions(order: FairOrder, running: Iterable[RunningJob], now: float) -> list[Preemption]:
    """Return the preemptions to make now.

    After a job that cannot preempt, its tenant's later ones are not tried.

    Args:
        order: a round of admissions that has run; not changed. The jobs of `order.blocked` may preempt.
        running: the jobs that may be preempted, once they have run for MIN_RUN_S.
        now: unix seconds.
    """
    round_ = _Round(order)
    candidates = [one.demand for one in running if now - one.since >= MIN_RUN_S]
    found: list[Preemption] = []
    failed: set[str] = set()
    for demand in order.blocked:
        if demand.tenant in failed or not candidates:
            continue
        victims = round_.make_room(demand, candidates)
        if victims is None:
            failed.add(demand.tenant)
            continue
        if victims:
            found.append(Preemption(demand, tuple(victims)))
        candidates = [one for one in candidates if one not in victims]
    return found


class _Round:
    """Free units of each resource, and units that each tenant holds, as they will be after the preemptions found so far.

    Of each resource that a guarded job needs (one that others must not delay), the units that are free now are kept for guarded jobs. Any other
    job can use only units that preemptions free: those of its own victims, and those that earlier preemptions leave over.

    A job that needs no victims, because earlier preemptions leave enough room, is admitted in a later round, and only if no other job takes the
    room. Its units count in its tenant's share when the tenant preempts (`_holdings`), but not when the tenant is preempted (`_certain`):
    otherwise the tenant would lose jobs because of units that it may never get.

    order: a round of admissions that has run; not changed.
    """

    def __init__(self, order: FairOrder) -> None:
        self._free = {resource: max(0, units) for resource, units in order.space.free.items()}
        self._holdings, self._certain = order.holdings.copy(), order.holdings.copy()
        self._guards = order.guards
        guarded = {resource for guard in self._guards for resource in guard.need}
        self._kept = {resource: self._free[resource] for resource in guarded}

    def make_room(self, demand: JobDemand, candidates: Collection[JobDemand]) -> list[JobDemand] | None:
        """Return the jobs to preempt for a waiting job; None if no choice of them makes room. Count their units as freed, and the job's as held.

        An empty list means that earlier preemptions have left enough room.

        Args:
            demand: the waiting job.
            candidates: the running jobs that may be preempted.
        """
        victims = self._choose(demand, candidates)
        if victims is None:
            return None
        self._spare(demand, victims)
        self._move(demand, 1, is_certain=bool(victims))
        return victims

    def _choose(self, demand: JobDemand, candidates: Collection[JobDemand]) -> list[JobDemand] | None:
        after, victims = self._holdings.share_after(demand), list[JobDemand]()
        while lacking := self._lacks(demand):
            possible = [
                one
                for one in candidates
                if one not in victims
                and one.tenant != demand.tenant
                and any(one.need.get(resource) for resource in lacking)
                and after < self._certain.share(one.tenant) - _SAME
            ]
            if not possible:
                for victim in victims:
                    self._move(victim, 1)
                return None
            victim = max(possible, key=self._urgency)
            self._move(victim, -1)
            victims.append(victim)
        return victims

    def _urgency(self, victim: JobDemand) -> tuple[object, ...]:
        """Return the sort key of a possible victim; the largest is preempted: largest share of its tenant, then lowest priority, then youngest."""
        return self._certain.share(victim.tenant), -victim.document.spec.priority, age(victim.document)

    def _spare(self, demand: JobDemand, victims: list[JobDemand]) -> None:
        """Remove from `victims` those that are not needed, because a later one frees enough units for `demand`, the waiting job."""
        for victim in list(victims[:-1]):
            self._move(victim, 1)
            if self._lacks(demand):
                self._move(victim, -1)
            else:
                victims.remove(victim)

    def _lacks(self, demand: JobDemand) -> list[Resource]:
        kept = {} if demand in self._guards else self._kept
        return [
            resource for resource, units in demand.need.items() if units > self._free[resource] - kept.get(resource, 0)
        ]

    def _move(self, demand: JobDemand, sign: int, *, is_certain: bool = True) -> None:
        self._holdings.take(demand, sign)
        if is_certain:
            self._certain.take(demand, sign)
        for resource, units in demand.need.items():
            self._free[resource] -= sign * units
