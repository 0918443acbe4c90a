"""Plans which adapter versions have a slot of the engine: loads, evictions, and versions that take no new requests for now.

Admitted agents may need more versions than there are slots. A version without a slot is loaded when a request waits for it or
when its agent's earlier version is in use, and is prefetched into a slot that nothing else needs. Pure; the clock is in seconds.

- A version with recent requests keeps its slot for a quantum (`ReloadPace.quantum_s`). After that it yields to a waiting version: it
  takes no new requests, and is evicted when its last request has ended.
- The tenants' usage decides between them, as in the engine's queue (`fair_queue`). A version in use yields only to a version of a tenant
  with the same or a smaller usage; the tenant with the largest usage yields first. If the other tenant's usage is smaller, the version
  is also revoked: its requests that wait for a place in the engine go back to wait for the version. They would be the last to get
  a place, so without this, requests that do not run would keep the slot for long.
- The tenant with the smallest usage gets slots first. That includes the next version of an agent in use, although no request waits for
  it yet: otherwise a tenant with few jobs would wait for a slot at each step beside a tenant with many.
- A past version that an open step or evaluation may call again (`ServedAgent.call`) counts as current. Every other past version of
  a strict job counts as idle as soon as it has no requests: the step that it has sampled is over.
- Versions without recent requests are evicted first: superseded versions, then newest versions of strict jobs (their
  agent trains, and the next request is for another version), then other newest versions, each least recently used first.
- Re-loads of versions that have served requests cost at most 2 % of what the engine can do: 2 % of a full engine's time, and at
  most 10 % of the time of one that runs few requests (`reload_pace`). To keep this limit, the evictions of versions in use are limited,
  and not the re-loads after them, because requests that wait for such a re-load are the last of their step or episode. A version in use
  is evicted only if there is time for its re-load in addition to the re-loads that are expected already.
- Re-loads of versions that were evicted as idle are not expected. A few of them may begin before there is time for them (`MAX_CREDIT`).
  While re-loads exceed their limit, a version counts as needed, and not as idle, for `MAX_QUANTUM_S` after its last request. A version
  that no request waits for is loaded again only if there is time.
- While the engine runs no request, a re-load delays none: it is not limited and does not count.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from marlaas_worker.rollout.reload_pace import MAX_CREDIT, MAX_QUANTUM_S, MIN_BUSY, ReloadPace

RECENT_S = 1.0
"""Seconds without requests after which a version counts as idle. Longer than most tool calls between two turns."""


class Urgency(IntEnum):
    """Reason for a load, the most urgent first.

    WAITING: requests wait for the version. SUCCESSOR: no request waits, but the agent had requests in the last 60 s
    (`versions.IN_USE_S`), and this is the first load of its newest version; only idle versions are evicted for it. PREFETCH: any
    other load of an agent's newest version; only idle versions that are not current (`Resident.is_current`) are evicted for it.
    """

    WAITING = 0
    SUCCESSOR = 1
    PREFETCH = 2


@dataclass(frozen=True, slots=True)
class Resident:
    """A version that has a slot. Times are in seconds, on the clock of `plan_pages`' argument `now`.

    Attributes:
        name: its engine name.
        loaded_at: when its load began.
        used_at: when a request last began or ended on it, or ended its wait for a place in the engine; `loaded_at` before the first.
        num_running: requests in the engine.
        num_queued: requests that wait for a place in the engine.
        is_ready: whether its load has ended.
        is_current: whether it is the newest version of a served agent, or a past one that an open step or evaluation may call again.
        is_strict: whether it samples only one step of its job (maxStaleness 0), so that even the newest version may get no more requests.
        usage: tokens that its tenant has used, divided by the tenant's weight (`fair_queue`).
        has_served: whether a request has run on it in this incarnation of the engine, now or before an eviction.
        is_yielding: whether it takes no new requests, because the previous plan chose it to yield.
    """

    name: str
    loaded_at: float
    used_at: float
    num_running: int = 0
    num_queued: int = 0
    is_ready: bool = True
    is_current: bool = True
    is_strict: bool = False
    usage: float = 0.0
    has_served: bool = True
    is_yielding: bool = False


@dataclass(frozen=True, slots=True)
class PageDemand:
    """A version without a slot that may be loaded.

    Attributes:
        name: its engine name.
        urgency: why it may be loaded.
        is_reload: whether a request has run on it in this incarnation of the engine.
        usage: tokens that its tenant has used, divided by the tenant's weight (`fair_queue`).
    """

    name: str
    urgency: Urgency
    is_reload: bool = False
    usage: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """Requests that wait for a version.

    name: the version's engine name. tenant: that of the first of these requests. since: when the first one began to wait, in
    seconds.
    """

    name: str
    tenant: str
    since: float


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Next actions, in this order: evict, then load. Versions are given by their engine names.

    Attributes:
        evict: versions to evict first.
        load: versions to load then, in this order.
        yielding: versions that take no new requests for now.
        revoked: those of them on which requests that wait for a place in the engine do not run either.
        expected: those of the versions to evict that will probably be loaded again soon (`ReloadPace.expect`).
        is_short: whether no slot was found for a version that requests wait for, or will soon (`Urgency.SUCCESSOR`).
        review_s: seconds until the plan may change although nothing happens; infinite if it will not.
    """

    evict: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    yielding: frozenset[str] = frozenset()
    revoked: frozenset[str] = frozenset()
    expected: frozenset[str] = frozenset()
    is_short: bool = False
    review_s: float = math.inf


def order_waits(waits: Iterable[Wait], usage: Callable[[str], float]) -> list[Wait]:
    """Sort waits: those of the tenant with the smallest usage first; of equal ones, the one that began first.

    usage: returns the tokens that a tenant has used, divided by its weight (`fair_queue`).
    """
    return sorted(waits, key=lambda wait: (usage(wait.tenant), wait.since))


def plan_pages(
    num_slots: int, residents: Sequence[Resident], demands: Iterable[PageDemand], pace: ReloadPace, now: float
) -> PagePlan:
    """Plan loads and evictions. A version with requests in the engine, or one that is loading, is never evicted.

    Args:
        num_slots: number of adapter slots of the engine.
        residents: the versions that have a slot.
        demands: the versions without a slot, in any order; those with equal urgency and usage are served in the given order.
        pace: load times of this engine, and the time budget of re-loads.
        now: time in seconds, on the clock of all times in `residents`.
    """
    return _Planner(num_slots, residents, pace, now).plan(demands)


class _Planner:
    """State of one call of `plan_pages`."""

    def __init__(self, num_slots: int, residents: Sequence[Resident], pace: ReloadPace, now: float) -> None:
        self._free = num_slots - len(residents)
        self._residents = residents
        self._pace = pace
        self._now = now
        self._recent_s = min(RECENT_S, pace.quantum_s)
        # A load in progress counts as a request: else any number of re-loads would begin while none runs.
        num_running = sum(one.num_running for one in residents) or sum(not one.is_ready for one in residents)
        self._busy = pace.busy(num_running)
        self._expected = pace.expected(now)
        reloading = [one for one in residents if not one.is_ready and one.has_served and one.name not in self._expected]
        self._num_expected = len(self._expected) + len(reloading) + sum(one.is_yielding for one in residents)
        self._is_exceeded = self._busy > 0 and pace.is_exceeded(now, self._num_expected, self._busy)
        self._victims = sorted(
            (one for one in residents if one.is_ready and not one.num_running and not self._is_kept(one)),
            key=self._rank,
        )
        self._evict: list[Resident] = []
        self._load: list[str] = []
        self._missing: list[float] = []
        self._is_short = False
        self._review_s = math.inf

    def plan(self, demands: Iterable[PageDemand]) -> PagePlan:
        """Plan loads, evictions and yields. demands: as of `plan_pages`."""
        for demand in sorted(demands, key=_turn):
            self._place(demand)
        if self._free == 0 and not self._missing and (spare := self._victim(Urgency.PREFETCH, 0.0)) is not None:
            self._evict.append(spare)
        if self._is_short or self._free <= 0:
            idle = [one for one in self._residents if not one.num_running]
            self._review_at(one.used_at + seconds for one in idle for seconds in (self._recent_s, self._needed_s(one)))
        if self._is_short:
            self._review_at(one.loaded_at + self._pace.quantum_s for one in self._residents)
        yielding, revoked = self._yielding()
        return PagePlan(
            evict=tuple(one.name for one in self._evict),
            load=tuple(self._load),
            yielding=yielding,
            revoked=revoked,
            expected=frozenset(one.name for one in self._evict if self._is_needed(one)),
            is_short=self._is_short,
            review_s=self._review_s,
        )

    def _place(self, demand: PageDemand) -> None:
        """Plan the load of a version if a slot is free or can be freed for it; otherwise record that it lacks one.

        A re-load for which there is no time is left out.
        """
        is_limited = demand.is_reload and demand.name not in self._expected
        if is_limited and not self._has_time(1 if demand.urgency is Urgency.PREFETCH else 1 - MAX_CREDIT):
            return
        if self._free > 0:
            self._free -= 1
        elif (victim := self._victim(demand.urgency, demand.usage)) is not None:
            self._evict.append(victim)
        else:
            self._is_short = self._is_short or demand.urgency is not Urgency.PREFETCH
            if demand.urgency is Urgency.WAITING:
                self._missing.append(demand.usage)
            return
        self._load.append(demand.name)
        self._num_expected += is_limited
        self._busy = max(self._busy, MIN_BUSY) if demand.is_reload else self._busy

    def _has_time(self, num_loads: int) -> bool:
        """Return whether there is time for `num_loads` re-loads in addition to the expected ones.

        If not, the plan is reviewed (`review_s`) when there will be, or earlier. num_loads: if negative, the budget may be overdrawn by the
        cost of that many re-loads.
        """
        if not self._busy:
            return True
        delay_s = self._pace.delay_s(self._now, self._num_expected, num_loads, self._busy)
        if delay_s > 0:
            self._review_s = min(self._review_s, delay_s)
        return delay_s == 0

    def _victim(self, urgency: Urgency, usage: float) -> Resident | None:
        """Return the next version to evict for a demand, and remove it from the candidates; None if no version may be evicted for it.

        urgency: of the demand. usage: of the demand's tenant.
        """
        found = next((one for one in self._victims if self._may_lose(one, urgency, usage)), None)
        if found is not None:
            self._victims.remove(found)
        return found

    def _may_lose(self, one: Resident, urgency: Urgency, usage: float) -> bool:
        if urgency is Urgency.PREFETCH and (one.is_current or self._is_recent(one)):
            return False
        if (self._is_recent(one) and one.usage < usage) or (one.num_queued and one.usage == usage):
            return False
        return not self._is_costly(one) or (urgency is Urgency.WAITING and self._take(one))

    def _take(self, one: Resident) -> bool:
        """Return whether a needed version may lose its slot: it yields already, or there is time for its re-load.

        In the second case, the re-load counts as expected from now on, so that later calls have less time.
        """
        if one.is_yielding:
            return True
        has_time = self._has_time(1)
        self._num_expected += has_time
        return has_time

    def _is_needed(self, one: Resident) -> bool:
        """Return whether a re-load probably follows the eviction of a version."""
        seconds = self._needed_s(one) if self._is_exceeded else 0.0
        return one.has_served and (self._is_recent(one) or self._now < one.used_at + seconds)

    def _is_costly(self, one: Resident) -> bool:
        """Return whether the eviction of a version probably causes a re-load that is not expected already."""
        return self._is_needed(one) and not one.is_yielding

    def _needed_s(self, one: Resident) -> float:
        """Return the seconds after its last request for which a version counts as needed while re-loads exceed their limit."""
        return RECENT_S if one.is_strict and not one.is_current else MAX_QUANTUM_S

    def _yielding(self) -> tuple[frozenset[str], frozenset[str]]:
        """Choose versions in use that yield, one for each version that requests wait for and that found no slot.

        Returns the engine names of the yielding versions, and of those among them that are revoked (`PagePlan`).

        Those that yield already are chosen first, then those of the tenants with the largest usage, then superseded ones, then those
        loaded first. No version yields to one of a tenant with a larger usage. A version is revoked only if it yields to one of a tenant
        with a smaller usage.
        """
        in_use = [one for one in self._residents if one.num_running or one.num_queued]
        due = sorted(
            (one for one in in_use if not self._is_kept(one) and one not in self._evict),
            key=lambda one: (not one.is_yielding, -one.usage, one.is_current, one.loaded_at),
        )
        pairs: list[tuple[Resident, float]] = []
        for usage in sorted(self._missing):
            found = next((one for one in due if usage <= one.usage and self._take(one)), None)
            if found is not None:
                due.remove(found)
                pairs.append((found, usage))
        return frozenset(one.name for one, _ in pairs), frozenset(one.name for one, usage in pairs if usage < one.usage)

    def _review_at(self, times: Iterable[float]) -> None:
        due = [at - self._now for at in times if at > self._now]
        self._review_s = min([self._review_s, *due])

    def _is_recent(self, one: Resident) -> bool:
        if one.num_running or one.num_queued:
            return True
        is_past = one.is_strict and not one.is_current
        return not is_past and self._now < one.used_at + self._recent_s

    def _is_kept(self, one: Resident) -> bool:
        """Return whether a version keeps its slot: it has recent requests, and its quantum is not over."""
        return self._is_recent(one) and self._now < one.loaded_at + self._pace.quantum_s

    def _rank(self, one: Resident) -> tuple[bool, bool, float, bool, bool, bool, float]:
        is_recent = self._is_recent(one)
        usage = one.usage if is_recent else 0.0
        return (
            self._is_costly(one),
            is_recent,
            -usage,
            one.num_queued > 0,
            one.is_current,
            not one.is_strict,
            one.used_at,
        )


def _turn(demand: PageDemand) -> tuple[bool, float, Urgency]:
    """Return a demand's sorting key: the smallest usage first, also for versions that no request waits for yet; prefetches last."""
    if demand.urgency is Urgency.PREFETCH:
        return (True, 0.0, demand.urgency)
    return (False, demand.usage, demand.urgency)
