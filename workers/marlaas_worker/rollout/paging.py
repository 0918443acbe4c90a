"""Which adapter versions have a slot of the engine: loads, evictions, and versions that take no new requests.

Admitted agents may need more versions than there are slots. A version without a slot is loaded when a request waits for
it or when its agent's earlier version is in use, and is prefetched into a slot that nothing else needs. Pure; the caller
passes the clock, in seconds.

- A version with recent requests keeps its slot for a quantum. After that it yields to a waiting version: it takes no new
  requests, and is evicted when its last one has ended.
- Between tenants the usage decides, as in the engine's queue (`fair_queue`): versions in use yield only to those of tenants
  with the same usage or a smaller one, the tenant with the largest usage first. If the usage is smaller, also the requests that
  already wait for a place in the engine wait for the version again. They are the last to get a place, so the slot would be
  kept for long by requests that do not run.
- The tenant with the smallest usage is served first, also with the next version of an agent in use, which no request waits
  for yet: else a tenant with few jobs would wait for a slot at each step beside one with many.
- A past version that an open step or evaluation may call again (`slots.PastCalls`) counts as current. Every other past version of
  a strict job is evicted as soon as no request runs: the step that it has sampled is over.
- A version without recent requests is evicted first: superseded versions, then newest versions of strict jobs (their
  agent trains, and the next request is for another version), then other newest versions, each least recently used first.
- Re-loads of versions that have served requests take at most `MAX_RELOAD_SHARE` of the time while other requests run. The evictions
  that cause them are limited, never the re-loads: the requests that wait for one are the last of their step or episode. A
  version in use yields only if there is time for its next load, which is then reserved (`is_prepaid`). Only a version that was idle
  and is needed again is loaded on credit; until that is paid, versions count as needed for longer after their last request.
  With an engine that runs nothing, a re-load delays no request, and does not count.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from marlaas_worker.rollout.reload_pace import MAX_QUANTUM_S, ReloadPace

RECENT_S = 1.0
"""A version without requests for so long counts as idle. Longer than most tool calls between two turns."""


class Urgency(IntEnum):
    """Reason for a load, the most urgent first.

    WAITING: requests wait for the version. SUCCESSOR: first load of the newest version of an agent in use.
    PREFETCH: newest version of another agent; only superseded idle versions are evicted for it.
    """

    WAITING = 0
    SUCCESSOR = 1
    PREFETCH = 2


@dataclass(frozen=True, slots=True)
class Resident:
    """A version that has a slot.

    Attributes:
        loaded_at, used_at: when its load began; when its last request began or ended, or its load if there was none.
        num_running: requests in the engine. num_queued: requests that wait for a place in the engine.
        is_ready: whether its load has ended.
        is_current: whether it is the newest version of a served agent, or a past one that an open step or evaluation may call again.
        is_strict: whether it samples one step of its job only (maxStaleness 0), so that the newest one may have no more requests.
        usage: of its tenant, as in `fair_queue`.
        is_prepaid: whether the time of its next load is reserved, because it yields.
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
    is_prepaid: bool = False


@dataclass(frozen=True, slots=True)
class PageDemand:
    """A version without a slot.

    is_reload: whether it has served a request before in this incarnation of the engine. usage: of its tenant; 0 if its requests
    have waited for very long. is_prepaid: whether the time of this load was reserved when the version was evicted or yielded.
    """

    name: str
    urgency: Urgency
    is_reload: bool = False
    usage: float = 0.0
    is_prepaid: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Requests that wait for a version. since: when the first of them began to wait."""

    name: str
    tenant: str
    since: float


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Next actions, in this order: evict, then load.

    Attributes:
        yielding: versions that take no new requests for now.
        revoked: those of them that do not serve the requests that wait for a place in the engine either.
        prepaid: versions in use that are evicted or begin to yield, for whose next load time is now reserved.
        review_s: seconds until another plan may result although nothing happens; infinite if none.
    """

    evict: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    yielding: frozenset[str] = frozenset()
    revoked: frozenset[str] = frozenset()
    prepaid: frozenset[str] = frozenset()
    review_s: float = math.inf


def order_waits(waits: Iterable[Wait], usage: Callable[[str], float]) -> list[Wait]:
    """Sort waits: the tenant with the smallest usage first, then the first to wait."""
    return sorted(waits, key=lambda wait: (usage(wait.tenant), wait.since))


def plan_pages(
    num_slots: int, residents: Sequence[Resident], demands: Iterable[PageDemand], pace: ReloadPace, now: float
) -> PagePlan:
    """Plan loads and evictions. A version in use, or one that is loading, is never evicted.

    Args:
        demands: versions without a slot, the most urgent first.
    """
    return _Planner(num_slots, residents, pace, now).plan(demands)


class _Planner:
    """One call of `plan_pages`."""

    def __init__(self, num_slots: int, residents: Sequence[Resident], pace: ReloadPace, now: float) -> None:
        self._free = num_slots - len(residents)
        self._residents = residents
        self._pace = pace
        self._now = now
        self._is_idle = not any(one.num_running or not one.is_ready for one in residents)
        self._victims = sorted(
            (one for one in residents if one.is_ready and not one.num_running and not self._is_kept(one)),
            key=self._rank,
        )
        self._evict: list[str] = []
        self._load: list[str] = []
        self._missing: list[float] = []
        self._prepaid: list[str] = []
        self._review_s = math.inf

    def plan(self, demands: Iterable[PageDemand]) -> PagePlan:
        """Return the plan."""
        wanted = sorted(demands, key=_turn)
        for demand in wanted:
            self._place(demand)
        if self._free == 0 and not self._missing and (spare := self._victim(Urgency.PREFETCH, 0.0)) is not None:
            self._evict.append(spare.name)
        if self._missing or self._free <= 0:
            self._review_at(one.used_at + self._recent_s for one in self._residents if not one.num_running)
        yielding, revoked = self._yielding()
        prepaid = frozenset(self._prepaid)
        return PagePlan(tuple(self._evict), tuple(self._load), yielding, revoked, prepaid, self._review_s)

    @property
    def _recent_s(self) -> float:
        return min(RECENT_S, self._pace.quantum_s)

    def _place(self, demand: PageDemand) -> None:
        """Find a slot for a version, or count it as missing."""
        if self._free > 0:
            self._free -= 1
        elif (victim := self._victim(demand.urgency, demand.usage)) is not None:
            self._evict.append(victim.name)
        else:
            if demand.urgency is Urgency.WAITING:
                self._missing.append(demand.usage)
            return
        self._load.append(demand.name)
        if demand.is_reload and not demand.is_prepaid:
            self._reserve()
        self._is_idle = self._is_idle and not demand.is_reload

    def _reserve(self) -> None:
        """Reserve the time of a re-load. It counts only if it delays requests."""
        if not self._is_idle:
            self._pace.begin_reload(self._now)

    def _may_take(self, one: Resident) -> bool:
        """Return whether a version may lose its slot. If it is probably needed again, reserve the time of its next load."""
        if not self._is_costly(one):
            return True
        delay_s = 0.0 if self._is_idle else self._pace.delay_s(self._now)
        if delay_s > 0:
            self._review_s = min(self._review_s, delay_s)
            return False
        self._reserve()
        self._prepaid.append(one.name)
        return True

    def _is_costly(self, one: Resident) -> bool:
        """Return whether an eviction probably causes a re-load for which no time is reserved yet."""
        if one.is_prepaid or self._is_recent(one):
            return not one.is_prepaid
        needed_s = RECENT_S if one.is_strict and not one.is_current else MAX_QUANTUM_S
        return self._pace.owes(self._now) and self._now < one.used_at + needed_s

    def _victim(self, urgency: Urgency, usage: float) -> Resident | None:
        """Take the next version to evict; None if there is none for this urgency and a tenant of this usage."""
        if not self._victims:
            return None
        first = self._victims[0]
        if urgency is Urgency.PREFETCH and (first.is_current or self._is_recent(first)):
            return None
        if (self._is_recent(first) and first.usage < usage) or (first.num_queued and first.usage == usage):
            return None
        return self._victims.pop(0) if self._may_take(first) else None

    def _yielding(self) -> tuple[frozenset[str], frozenset[str]]:
        """Choose versions in use, one for each missing version; return them, and those that are revoked.

        Those of the tenants with the largest usage go first, then superseded ones, then those loaded first. No version
        yields to one of a tenant with a larger usage, and only to one of a tenant with a smaller usage it is revoked.
        """
        in_use = [one for one in self._residents if one.num_running or one.num_queued]
        if self._missing:
            self._review_at(one.loaded_at + self._pace.quantum_s for one in self._residents)
        due = sorted(
            (one for one in in_use if not self._is_kept(one) and one.name not in self._evict),
            key=lambda one: (not one.is_prepaid, -one.usage, one.is_current, one.loaded_at),
        )
        matched = zip(due, sorted(self._missing), strict=False)
        pairs = [(one, usage) for one, usage in matched if usage <= one.usage and self._may_take(one)]
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
    """Return the sorting key of demands: the tenant with the smallest usage goes first, also with versions that no request waits for yet."""
    if demand.urgency is Urgency.PREFETCH:
        return (True, 0.0, demand.urgency)
    return (False, demand.usage, demand.urgency)
