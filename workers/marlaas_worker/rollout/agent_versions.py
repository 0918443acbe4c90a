"""The versions of an agent's adapter in this replica's engine: one object per version. No I/O; the caller passes the clock, in seconds."""

import asyncio
import math
from dataclasses import dataclass, field
from enum import StrEnum

from marlaas_api.bus import BusRefused
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.messages import Manifest
from marlaas_api.names import AdapterRef, AgentRef
from marlaas_worker.rollout.engine import LoadedAdapter
from marlaas_worker.rollout.paging import PageDemand, Resident, Urgency, Wait

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 10.0
"""First and longest backoff after a failed load, in seconds."""
CALLED_S = 60.0
"""Seconds after its last request for which a past version counts as one that may be requested again (`ServedAgent.call`).

Longer than nearly all tool calls.
"""
IN_USE_S = 60.0
"""Seconds for which an agent counts as in use after its last request."""


class VersionRefused(Permanent):
    """A version that failed its proof or that the engine refused; it is never served."""


class VersionState(StrEnum):
    """State of a version in one incarnation of the engine. From LOADING to REVOKED it has a slot.

    WANTED: it has no slot, or not yet. LOADING: it is being loaded and proven. PROVEN: it serves requests. YIELDING: it takes no new
    requests for now; those that wait for a place in the engine still run on it. REVOKED: those do not run on it either. UNLOADING: it is
    being removed from the engine; another version may already be planned for its slot. FAILED: its last load failed, and will be tried
    again. REFUSED: it is never served.
    """

    WANTED = "wanted"
    LOADING = "loading"
    PROVEN = "proven"
    YIELDING = "yielding"
    REVOKED = "revoked"
    UNLOADING = "unloading"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """The last failed load of a version.

    error: of this load. attempts: failed loads in a row. retry_at: when the next attempt is due; None: no other in this
    incarnation of the engine.
    """

    error: Exception
    attempts: int
    retry_at: float | None

    def may_try(self, now: float) -> bool:
        """Return whether an attempt is due."""
        return self.retry_at is not None and self.retry_at <= now


def failed_load(before: FailedLoad | None, error: Exception, now: float) -> FailedLoad:
    """Return the failure of a version's load. before: that of the attempt before this one; None if this was the first.

    The load is retried, with exponential backoff up to LONGEST_WAIT_S, unless the error shows that the version itself is at fault.
    It is not at fault if the bus refuses the credentials (they are renewed), or if this machine lacks files, memory or threads.
    """
    attempts = 1 if before is None else before.attempts + 1
    may_succeed = isinstance(error, Retryable | BusRefused | OSError | MemoryError | RuntimeError)
    wait_s = min(FIRST_WAIT_S * 2 ** min(attempts - 1, 10), LONGEST_WAIT_S)
    return FailedLoad(error, attempts, now + wait_s if may_succeed else None)


@dataclass(slots=True, eq=False)
class Slot:
    """The slot of a version, from the beginning of its load until the slot is free. Each load has its own object.

    A request keeps the object. So if it ends after an engine restart, it does not change the numbers of a later load of the version.

    Attributes:
        loaded: the adapter as the engine knows it.
        loaded_at: when its load began.
        used_at: when a request last began or ended on it, or ended its wait for a place in the engine; `loaded_at` before the first.
        charged_from: since when the slot's seconds are charged to the agent; None while they are not, because its job is not served.
        manifest: of the version; None until it is proven.
        num_running: its requests in the engine.
        num_queued: its requests that wait for a place in the engine.
    """

    loaded: LoadedAdapter
    loaded_at: float
    used_at: float
    charged_from: float | None
    manifest: Manifest | None = None
    num_running: int = 0
    num_queued: int = 0

    def charged_s(self, now: float) -> float:
        """Return the seconds since `charged_from`, which `ServedAgent.ended_slot_s` does not contain yet; 0 while nothing is charged."""
        return 0.0 if self.charged_from is None else now - self.charged_from


@dataclass(slots=True, eq=False)
class Waiting:
    """All requests that wait for one version.

    Attributes:
        wait: the version's name, the first request's tenant and the begin of its wait, as input of `paging.plan_pages`.
        num: number of the requests.
        decided: set when the requests must check the version's state again.
    """

    wait: Wait
    num: int = 0
    decided: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class Version:
    """One version of an agent, in the current incarnation of the engine.

    Attributes:
        agent: the agent that it belongs to.
        adapter: identity of the version.
        state: whether it is loaded and may be used (`VersionState`).
        slot: the engine slot that it takes; None if it has none.
        waiting: the requests that wait for it; None without any.
        failure: its last failed load since the last successful one; None if there is none.
        unload: the task that removes it from the engine; None if no such task runs.
    """

    agent: "ServedAgent"
    adapter: AdapterRef
    state: VersionState = VersionState.WANTED
    slot: Slot | None = None
    waiting: Waiting | None = None
    failure: FailedLoad | None = None
    unload: "asyncio.Task[None] | None" = None

    @property
    def name(self) -> str:
        """The name of its adapter in the engine."""
        return self.adapter.engine_name

    @property
    def is_ready(self) -> bool:
        """Whether it was loaded and proven, and still has its slot."""
        return self.state in (VersionState.PROVEN, VersionState.YIELDING, VersionState.REVOKED)

    @property
    def is_needed(self) -> bool:
        """Whether it has a slot, waiting requests, a failed load or an unload in progress; otherwise its object is dropped."""
        return not (self.slot is None and self.waiting is None and self.failure is None and self.unload is None)

    @property
    def is_current(self) -> bool:
        """Whether it is the newest version of an agent that this replica serves."""
        return self.agent.newest == self.adapter.version and self.agent.is_placed_here

    @property
    def is_committed(self) -> bool:
        """False if it is known not to be committed yet. A strict job's groups are pinned to a version before its commit."""
        return self.agent.newest is None or self.adapter.version <= self.agent.newest

    @property
    def was_proven(self) -> bool:
        """Whether it passed all checks in this incarnation of the engine, even if it was evicted since."""
        return self.adapter.version in self.agent.proven

    @property
    def has_served(self) -> bool:
        """Whether a request has run on it in this incarnation of the engine."""
        return self.adapter.version in self.agent.used

    def may_load(self, now: float) -> bool:
        """Return whether a load may begin: none has failed, or its next attempt is due."""
        return self.failure is None or self.failure.may_try(now)

    def raise_refusal(self) -> None:
        """Raise VersionRefused if it is refused."""
        if self.state is VersionState.REFUSED and self.failure is not None:
            raise VersionRefused(f"{self.name} is refused: {self.failure.error}") from self.failure.error

    def wake(self) -> None:
        """Wake the requests that wait for it, so that they check its state again."""
        if self.waiting is not None:
            self.waiting.decided.set()
            self.waiting = None

    def free_slot(self, now: float) -> None:
        """Free its slot, if it has one, and add the slot's charged seconds to `ServedAgent.ended_slot_s`."""
        if self.slot is not None:
            self.agent.ended_slot_s += self.slot.charged_s(now)
            self.slot = None

    def restart(self, now: float) -> None:
        """Reset its slot, state and failure, after an incarnation of the engine has stopped. Its waiting requests go on waiting."""
        self.free_slot(now)
        self.state = VersionState.WANTED
        self.failure = None

    def charge_slot(self, is_served: bool, now: float) -> None:
        """Begin to charge the slot's seconds to the agent if its job is served; stop if it is not, although the version keeps its slot."""
        if self.slot is None or is_served == (self.slot.charged_from is not None):
            return
        self.agent.ended_slot_s += self.slot.charged_s(now)
        self.slot.charged_from = now if is_served else None

    def as_resident(self, slot: Slot, usage: float, now: float) -> Resident:
        """Describe the version, which has a slot, for `paging.plan_pages`.

        slot: the version's. usage: its tenant's, in tokens / weight, as in `fair_queue`.
        """
        is_called = self.agent.may_call(self.adapter.version, now)
        return Resident(
            self.name,
            slot.loaded_at,
            slot.used_at,
            slot.num_running,
            slot.num_queued,
            is_ready=self.is_ready,
            is_current=self.is_current or is_called,
            is_strict=self.agent.is_strict and not is_called,
            usage=usage,
            has_served=self.has_served,
            is_yielding=self.state in (VersionState.YIELDING, VersionState.REVOKED),
        )

    def as_demand(self, usage: float, now: float) -> PageDemand:
        """Describe the version, which has no slot, for `paging.plan_pages`. usage: its tenant's, in tokens / weight, as in `fair_queue`."""
        # Once only: versions that no request uses would otherwise take the slots from each other for ever.
        is_successor = now - self.agent.used_at < IN_USE_S and not self.was_proven
        urgency = Urgency.SUCCESSOR if is_successor else Urgency.PREFETCH
        urgency = Urgency.WAITING if self.waiting is not None else urgency
        return PageDemand(self.name, urgency, self.has_served, usage)


@dataclass(slots=True, eq=False)
class ServedAgent:
    """An agent in this replica: its versions, and when its requests used them.

    Attributes:
        ref: identity of the agent.
        newest: its newest committed version; None while it is not served.
        is_strict: whether its job is strict.
        is_placed_here: whether this replica serves its requests; if not, its versions are loaded on request only.
        tenant: tenant of its last request; empty before the first.
        used_at: when one of its requests last began or ended; -infinity before the first.
        proven: numbers of the versions that were proven in this incarnation of the engine.
        used: numbers of the versions that requests have run on in this incarnation of the engine.
        called_at: time of the last request for each past version that may be requested again (`call`), by caller and version.
        ended_slot_s: total seconds of slots that were charged to the agent, without those that a slot still counts (`Slot.charged_s`).
        versions: by number; those without a slot, waiting requests, a failure or an unload are dropped in `serve`.
    """

    ref: AgentRef
    newest: int | None = None
    is_strict: bool = False
    is_placed_here: bool = True
    tenant: str = ""
    used_at: float = -math.inf
    proven: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    called_at: dict[str, dict[int, float]] = field(default_factory=dict)
    ended_slot_s: float = 0.0
    versions: dict[int, Version] = field(default_factory=dict)

    def version(self, adapter: AdapterRef) -> Version:
        """Return the object of one of its versions; it is created if there is none."""
        if (found := self.versions.get(adapter.version)) is None:
            found = self.versions[adapter.version] = Version(self, adapter)
        return found

    def serve(self, newest: int | None) -> None:
        """Set its newest committed version, and drop the objects of versions that are not needed any more (`Version.is_needed`).

        newest: None if the agent is not served any more; its tenant, uses, calls and proven versions are then reset.
        """
        self.newest = newest
        self.versions = {number: one for number, one in self.versions.items() if one.is_needed}
        if newest is None:
            self.tenant = ""
            self.used_at = -math.inf
            self.called_at = {}
            self.restart()

    def record_use(self, at: float) -> None:
        """Record that a request ran at this time. Ignored if the agent is not served any more."""
        if self.newest is not None:
            self.used_at = max(self.used_at, at)

    def restart(self) -> None:
        """Forget which of its versions were proven, and which have served requests."""
        self.proven = set()
        self.used = set()

    def slot_s(self, now: float) -> float:
        """Return the seconds for which its versions had slots while its job was served."""
        return self.ended_slot_s + sum(
            one.slot.charged_s(now) for one in self.versions.values() if one.slot is not None
        )

    def call(self, version: int, caller: str, num_open: int, now: float) -> None:
        """Record a request for a version that an open step or evaluation may request ("call") again although newer ones were committed.

        These are the versions of an agent that plays past versions, one for each open step, and the version of an evaluation. The end
        of a step or evaluation is not reported to this role. So a call is dropped after `num_open` later versions of the same caller,
        and counts for `CALLED_S` only.

        Args:
            version: number of the requested version.
            caller: name of the agent that plays past versions, or `(evaluation)` (`policies.past_caller`).
            num_open: most versions that the caller calls at a time.
        """
        called_at = self.called_at.setdefault(caller, {})
        called_at.pop(version, None)
        called_at[version] = now
        while len(called_at) > num_open:
            del called_at[next(iter(called_at))]

    def may_call(self, version: int, now: float) -> bool:
        """Return whether an open step or evaluation may call a past version again."""
        return any(now - called_at.get(version, -math.inf) < CALLED_S for called_at in self.called_at.values())
