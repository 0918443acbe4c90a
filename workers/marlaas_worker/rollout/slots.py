"""The engine's slots as the rollout role records them, and the requests that run on a version or wait for one. No engine and no I/O.

Each version of an agent's adapter is one object (`Version`). A request waits for its version in `ProvenVersions.queue`, and
`ProvenVersions.hold` prevents the version's eviction while the request runs. `paging` decides which versions are loaded and
evicted, and `versions` carries that out.

Times are in seconds. `ProvenVersions` reads the monotonic clock for waits, loads and uses. For charges and retries, the caller
passes the time (`now`).

Invariants: never more versions than slots; a version in use is never evicted; a slot number is never reused, so each load of a
version has its own number.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from marlaas_api.errors import Permanent
from marlaas_api.messages import Manifest
from marlaas_api.names import AdapterRef, AgentRef
from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed
from marlaas_worker.rollout.paging import Wait
from marlaas_worker.rollout.served_jobs import ServedAgent, ServedJobs


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
        wait: name of the version, tenant of the first request, and when that request began to wait; input of `paging.order_waits`.
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

    agent: ServedAgent
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


class ProvenVersions:
    """The versions that requests may use now, and the requests that wait for a version.

    Args:
        num_slots: number of adapter slots of the engine.
        numbers: source of slot numbers, shared with all others that load adapters into the same engine.
        jobs: the served jobs, which contain the `Version` objects of their agents.

    Attributes:
        resident: the versions that have a slot, in the order of their loads.
        waiting: the versions that requests wait for, in the order of the first request.
        served: the agents that are served and have a committed version.
        is_short: whether a version has no slot although requests wait for it, or will soon (`PagePlan.is_short`).
        wake: set when a request or a new version needs a change of the slots.
    """

    def __init__(self, num_slots: int, numbers: Iterator[int], jobs: ServedJobs) -> None:
        self.wake = asyncio.Event()
        self.num_slots = num_slots
        self.resident: dict[AdapterRef, Version] = {}
        self.waiting: dict[AdapterRef, Version] = {}
        self.served: tuple[ServedAgent, ...] = ()
        self.is_short = False
        self._numbers = numbers
        self._jobs = jobs
        self._changed = asyncio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        """Engine names of the versions that may be served now."""
        return tuple(one.name for one in self.resident.values() if one.is_ready)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a version."""
        return sum(one.waiting.num for one in self.waiting.values() if one.waiting is not None)

    def longest_wait_s(self) -> float:
        """Return the seconds for which the first of the requests has waited for its version; 0 if none waits.

        Versions that are not committed, or whose last load failed, do not count: a faster engine does not help them.
        """
        waiting = (one for one in self.waiting.values() if one.is_committed and one.failure is None)
        since = (one.waiting.wait.since for one in waiting if one.waiting is not None)
        now = time.monotonic()
        return now - min(since, default=now)

    def version(self, adapter: AdapterRef) -> Version:
        """Return the `Version` object of an adapter version, created if there is none. The agent's job must be known to exist."""
        if (resident := self.resident.get(adapter)) is not None:
            return resident
        agent = self._jobs.agent(adapter.agent_ref)
        if (found := agent.versions.get(adapter.version)) is None:
            found = agent.versions[adapter.version] = Version(agent, adapter)
        return found

    @asynccontextmanager
    async def queue(self, adapter: AdapterRef, tenant: str) -> AsyncIterator[None]:
        """Wait until a version takes new requests. While the context is open, the request counts in `Slot.num_queued`.

        The caller waits for a place in the engine inside the context, and then calls `hold`. Meanwhile the version may lose its slot,
        because a queued request does not prevent an eviction. Raises VersionRefused.

        tenant: of the request; it counts as the agent's from now on.
        """
        self._jobs.agent(adapter.agent_ref).tenant = tenant
        while (version := self.version(adapter)).state is not VersionState.PROVEN:
            await self._wait(version, tenant)
        assert version.slot is not None
        slot = version.slot
        slot.num_queued += 1
        try:
            yield
        finally:
            slot.num_queued -= 1
            slot.used_at = time.monotonic()

    @contextmanager
    def hold(self, adapter: AdapterRef) -> Iterator[Slot | None]:
        """Yield a version's slot, and prevent the version's unloading while the context is open.

        Yields None if the version has lost its slot or is revoked; the caller must then `queue` again.
        """
        version = self.resident.get(adapter)
        if version is None or version.state not in (VersionState.PROVEN, VersionState.YIELDING):
            yield None
            return
        assert version.slot is not None
        slot = version.slot
        slot.num_running += 1
        slot.used_at = time.monotonic()
        version.agent.used.add(adapter.version)
        try:
            yield slot
        finally:
            slot.num_running -= 1
            slot.used_at = time.monotonic()
            is_needed = bool(self.waiting) or self.is_short or version.state is not VersionState.PROVEN
            if is_needed and not slot.num_running:
                self.wake.set()

    async def _wait(self, version: Version, tenant: str) -> None:
        """Wait until the version takes requests or its state must be checked again. Raises VersionRefused if it is refused already."""
        version.raise_refusal()
        if version.waiting is None:
            version.waiting = Waiting(Wait(version.name, tenant, time.monotonic()))
            self.waiting[version.adapter] = version
            self.wake.set()
        waiting = version.waiting
        waiting.num += 1
        try:
            await waiting.decided.wait()
        finally:
            waiting.num -= 1
            if not waiting.num and version.waiting is waiting:
                self._wake(version)

    def newest_resident(self, agent: AgentRef) -> int:
        """Return the newest version of an agent that may be served now, without a load; -1 if there is none."""
        versions = self._jobs.agent(agent).versions.items()
        return max((number for number, one in versions if one.is_ready), default=-1)

    async def newest_of(self, ref: AgentRef, tenant: str, max_staleness: int) -> int:
        """Return the newest proven version of an agent; if all are too old, wait for the newest committed one. Raises VersionRefused.

        While the agent is not served or has no committed version, and no version of it is proven, the call waits.

        An evicted version counts too; it is loaded again when a request needs it. After a restart of the engine, a past
        version may be the first that is proven: a group that is sampled from it would be dropped as stale.

        tenant: of the request. max_staleness: most versions that the result may be behind the newest committed one.
        """
        while True:
            agent = self._jobs.agent(ref)
            newest = agent.newest
            best = max(self.newest_resident(ref), *agent.proven, -1)
            if best >= 0 and (newest is None or best >= newest - max_staleness):
                return best
            if newest is None:
                await self._changed.wait()
            else:
                await self._wait(self.version(ref.adapter(newest)), tenant)

    def prefer(
        self,
        newest: Iterable[AdapterRef],
        strict: Collection[AgentRef] = (),
        on_others: Collection[AgentRef] = (),
    ) -> None:
        """Set which agents are served, with their newest versions, and request a new plan of the slots (`wake`).

        Args:
            newest: the newest committed version of each served agent.
            strict: agents of jobs with maxStaleness 0, in which one version samples a whole step.
            on_others: agents whose requests only other replicas serve; their versions are loaded on request only.
        """
        versions = {adapter.agent_ref: adapter.version for adapter in newest}
        self.served = tuple(self._jobs.agent(ref) for ref in versions)
        for agent in self._jobs.agents():
            agent.serve(versions.get(agent.ref))
            agent.is_strict = agent.ref in strict
            agent.is_placed_here = agent.ref not in on_others
        self.wake.set()
        self._notify()

    def begin(self, version: Version, folder: Path, now: float) -> Slot:
        """Take a slot for a version before its load. Raises LoadFailed if no slot is free, or the version has one already.

        folder: of the adapter's files. now: time on the loop's clock, from which the agent is charged for the slot.
        """
        if version.adapter in self.resident or len(self.resident) >= self.num_slots:
            raise LoadFailed(f"there is no slot for {version.name}: {len(self.resident)} of {self.num_slots} are taken")
        loaded = LoadedAdapter(version.name, next(self._numbers), folder)
        version.slot = Slot(loaded, time.monotonic(), time.monotonic(), charged_from=now)
        version.state = VersionState.LOADING
        self.resident[version.adapter] = version
        return version.slot

    def add(self, version: Version, manifest: Manifest) -> None:
        """Mark a version as proven after its load, and wake the requests that wait for it."""
        assert version.slot is not None
        version.slot.manifest = manifest
        version.state = VersionState.PROVEN
        version.failure = None
        version.agent.proven.add(version.adapter.version)
        self._wake(version)
        self._notify()
        self.wake.set()

    def remove(self, version: Version, state: VersionState, now: float) -> None:
        """Stop giving a version to requests, free its slot, and set its new state. Raises LoadFailed while requests run on it.

        now: time on the loop's clock, until which the agent is charged for the slot.
        """
        if version.slot is not None and version.slot.num_running:
            raise LoadFailed(f"{version.name} still runs {version.slot.num_running} requests")
        version.free_slot(now)
        version.state = state
        self.resident.pop(version.adapter, None)
        if state is VersionState.REFUSED:
            self._wake(version)

    def clear(self, now: float) -> None:
        """Free all slots and forget all failed loads and refusals, after the engine has stopped. Requests that wait go on waiting.

        now: time on the loop's clock, until which the agents are charged for the slots.
        """
        for agent in self._jobs.agents():
            agent.restart()
            for version in agent.versions.values():
                version.restart(now)
        for version in self.resident.values():
            version.restart(now)
        self.resident.clear()

    def yield_slots(self, yielding: Collection[str], revoked: Collection[str] = ()) -> None:
        """Set which versions take no new requests for now, and wake the requests that wait for a version that takes them again.

        Args:
            yielding: engine names of the versions that take no new requests.
            revoked: of those, the ones that refuse also the requests that wait for a place in the engine.
        """
        for version in self.resident.values():
            if version.is_ready:
                limited = VersionState.REVOKED if version.name in revoked else VersionState.YIELDING
                version.state = limited if version.name in yielding else VersionState.PROVEN
            if version.state is VersionState.PROVEN and version.waiting is not None:
                self._wake(version)
                self._notify()

    def _wake(self, version: Version) -> None:
        """Wake the requests that wait for a version, so that they check its state again."""
        self.waiting.pop(version.adapter, None)
        version.wake()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
