"""The engine's slots as the rollout role records them, and the requests that run on a version or wait for one. No engine and no I/O.

A request waits for its version here (`ProvenVersions.queue`), and holds it while it runs (`ProvenVersions.hold`). `paging`
decides which versions are loaded and evicted, and `versions` carries that out.

Invariants: never more versions than slots; a version in use is never evicted; a slot number is never reused, so each load of a
version has its own number.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from marlaas_api.messages import Manifest
from marlaas_api.names import AdapterRef, AgentRef
from marlaas_worker.rollout.agent_versions import ServedAgent, Slot, Version, VersionState, Waiting
from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed
from marlaas_worker.rollout.paging import Wait
from marlaas_worker.rollout.served_jobs import ServedJobs


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
        return self.resident.get(adapter) or self._jobs.agent(adapter.agent_ref).version(adapter)

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
