"""Adapter versions in the engine: loads and proves them, retries failed loads, and evicts them.

Invariant: a version is given to requests (`slots.ProvenVersions`) only after its proof and before its unloading, in
one incarnation of the engine. Which versions are loaded and evicted is decided in `paging`.

`failed_load` decides whether and when a failed load is tried again. `_as_resident` and `_as_demand` describe versions as input
of `paging.plan_pages`. These three functions use no I/O, and their caller passes the clock.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from marlaas_api.bus import BusRefused
from marlaas_api.errors import Retryable
from marlaas_api.names import AdapterRef, JobRef
from marlaas_worker.reporter import EventEmitter
from marlaas_worker.role import wait_for
from marlaas_worker.rollout.adapter_cache import AdapterCache
from marlaas_worker.rollout.engine import EngineDown, LoadedAdapter, LoadFailed
from marlaas_worker.rollout.paging import PageDemand, Resident, Urgency, order_waits, plan_pages
from marlaas_worker.rollout.proof import load_proven
from marlaas_worker.rollout.reload_pace import ReloadPace
from marlaas_worker.rollout.served_jobs import ServedJobs
from marlaas_worker.rollout.slots import FailedLoad, ProvenVersions, Slot, Version, VersionState
from marlaas_worker.rollout.supervised_engine import SupervisedEngine

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 10.0
"""First and longest backoff after a failed load, in seconds."""
IN_USE_S = 60.0
"""Seconds for which an agent counts as in use after its last request."""
_REVIEW_S = 60.0
_MIN_REVIEW_S = 0.005
_log = logging.getLogger(__name__)


class Versions:
    """Loads the requested and the newest versions into the engine's slots, proves them, and evicts others for them.

    Args:
        adapter_cache: the adapters' files on this machine's disk.
        jobs: the state of each job on this replica.
        emitter: queues events for the owners of jobs.
        changed: called when the set of proven versions changes.

    Attributes:
        proven: the versions in the slots, and the requests that wait for versions.
        pace: load times of this engine, and the time budget of re-loads.
    """

    def __init__(
        self,
        engine: SupervisedEngine,
        adapter_cache: AdapterCache,
        jobs: ServedJobs,
        emitter: EventEmitter,
        changed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._adapter_cache = adapter_cache
        self._emitter = emitter
        self._changed = changed
        self.proven = ProvenVersions(engine.limits.slots, engine.slot_numbers, jobs)
        self.pace = ReloadPace(engine.limits.max_num_seqs)
        self._review_s = _REVIEW_S
        self._to_discard: list[AdapterRef] = []
        self._loading: set[asyncio.Task[None]] = set()
        self._unloading: set[asyncio.Task[None]] = set()

    def explain(self, adapter: AdapterRef) -> str:
        """Return a sentence for people: why a version is not served yet."""
        version = self.proven.version(adapter)
        if version.failure is not None:
            return f"the last attempt failed: {version.failure.error}"
        if not self._engine.up:
            return "the engine is restarting"
        if not version.is_committed:
            return "its trainer has not committed it yet"
        if version.slot is not None:
            return "it is being loaded and proven"
        return f"no free slot: all {self.proven.num_slots} hold versions in use or needed soon"

    def charge_slots(self, served: Collection[JobRef], now: float) -> None:
        """Charge agents for the seconds for which their versions have a slot, from `now` on only agents of the jobs in `served`.

        served: the admitted jobs that are not deleted.
        """
        for version in self.proven.resident.values():
            version.charge_slot(version.agent.ref.job in served, now)

    def engine_stopped(self) -> None:
        """Discard all state of the incarnation that has failed: cancel its loads, and free all slots."""
        for load in self._loading:
            load.cancel()
        self._to_discard += self.proven.resident
        self.pace.restart()
        self.proven.clear(_clock())
        self._changed()

    def engine_restarted(self) -> None:
        """Start loading again, into the empty engine."""
        self.proven.wake.set()

    async def reconcile(self) -> None:
        """Load and evict versions, until cancelled."""
        async with asyncio.TaskGroup() as loads:
            while True:
                self.proven.wake.clear()
                if self._engine.up:
                    await self._step(loads)
                await wait_for(self.proven.wake, self._until_review())

    async def _step(self, loads: asyncio.TaskGroup) -> None:
        """Run one round: plan (`plan_pages`), begin the evictions and loads, and wake requests whose version takes requests again.

        loads: the group in which their tasks run.
        """
        while self._to_discard:
            await self._adapter_cache.discard(self._to_discard.pop())
        if not self._engine.up:
            return  # It has failed meanwhile. A load would begin now, and could take a slot from the next self-test.
        now = _clock()
        usage = self._engine.limiter.usage
        wanted = self._wanted(now)
        residents = {one.name: one for one in self.proven.resident.values()}
        for one in residents.values():
            if one.slot is not None and one.slot.used_at > one.slot.loaded_at:
                one.agent.record_use(one.slot.used_at)
        plan = plan_pages(
            self.proven.num_slots,
            [_as_resident(one, one.slot, usage(one.agent.tenant), now) for one in residents.values() if one.slot],
            [_as_demand(one, usage(one.agent.tenant), now) for one in wanted.values() if one.slot is None],
            self.pace,
            now,
        )
        self._review_s = plan.review_s
        self.proven.yield_slots(plan.yielding, plan.revoked)
        self.proven.is_short = plan.is_short
        for name in plan.evict:
            self._evict(loads, residents[name])
        for name in plan.expected:
            self.pace.expect(name, now)
        for name in plan.load:
            self._begin(loads, wanted[name])

    def _wanted(self, now: float) -> dict[str, Version]:
        """Return the committed versions that should have a slot and may be loaded now, by engine name; the most urgent first.

        First those that requests wait for (`order_waits`), then the newest ones of agents placed here, the most recently used agent first.
        """
        waiting = {one.name: one for one in self.proven.waiting.values()}
        waits = (one.waiting.wait for one in waiting.values() if one.waiting is not None)
        ordered = [waiting[wait.name] for wait in order_waits(waits, self._engine.limiter.usage)]
        own = [one for one in self._newest() if one.agent.is_placed_here]
        own.sort(key=lambda one: -one.agent.used_at)
        versions = (*(one for one in ordered if one.is_committed), *own)
        return {one.name: one for one in versions if one.may_load(now)}

    def _newest(self) -> list[Version]:
        """Return the newest committed version of each served agent."""
        return [
            self.proven.version(agent.ref.adapter(agent.newest))
            for agent in self.proven.served
            if agent.newest is not None
        ]

    def _until_review(self) -> float:
        """Return the seconds after which the next round is due even if nothing sets `ProvenVersions.wake`."""
        if not self._engine.up:
            return _REVIEW_S
        failures = [one.failure for one in (*self.proven.waiting.values(), *self._newest())]
        retries = [one.retry_at - _clock() for one in failures if one is not None and one.retry_at is not None]
        return max(_MIN_REVIEW_S, min(_REVIEW_S, self._review_s, *retries))

    def _begin(self, loads: asyncio.TaskGroup, version: Version) -> None:
        slot = self.proven.begin(version, self._adapter_cache.place(version.adapter), _clock())
        load = loads.create_task(self._load(version, slot), name=f"load {version.name}")
        self._loading.add(load)
        load.add_done_callback(self._loading.discard)

    def _evict(self, evictions: asyncio.TaskGroup, version: Version) -> None:
        """Stop giving a version to requests, and begin to unload it.

        Loads that begin later wait until it is unloaded, so that the engine has a free slot for them. evictions: the group in which the
        unloading runs.
        """
        assert version.slot is not None
        loaded = version.slot.loaded
        self.proven.remove(version, VersionState.UNLOADING, _clock())
        self._changed()

        async def unload() -> None:
            try:
                await self._unload(loaded)
                await self._adapter_cache.discard(version.adapter)
            finally:
                version.unload = None
                if version.state is VersionState.UNLOADING:
                    version.state = VersionState.WANTED

        version.unload = evictions.create_task(unload(), name=f"unload {version.name}")
        self._unloading.add(version.unload)
        version.unload.add_done_callback(self._unloading.discard)

    async def _unload(self, loaded: LoadedAdapter) -> None:
        incarnation = self._engine.incarnation
        try:
            await self._engine.unload(loaded)
        except EngineDown:
            return
        except LoadFailed as error:
            self._engine.report(
                incarnation, f"it cannot unload {loaded.name}, so its slots are not as expected: {error}"
            )

    async def _load(self, version: Version, slot: Slot) -> None:
        """Load and prove a version. After an error, `_failed` plans another attempt or refuses the version; the role continues.

        slot: the one that was taken for the version.
        """
        incarnation, is_reload = self._engine.incarnation, version.has_served
        was_proven, before = version.was_proven, set(self._unloading)
        try:
            manifest = await self._adapter_cache.manifest(version.adapter)
            if version.unload is not None:  # Its files would be removed while they are read.
                await asyncio.wait({version.unload})
            await self._adapter_cache.fetch(manifest)
            if before:
                await asyncio.wait(before)
            slots = (one.slot for one in self.proven.resident.values() if one.slot is not None)
            busy = self.pace.busy(sum(one.num_running for one in slots))
            proof = await load_proven(self._engine, manifest, slot.loaded, probes=not was_proven)
        except Exception as error:
            if incarnation == self._engine.incarnation:
                await self._failed(version, slot.loaded, error)
        else:
            if incarnation == self._engine.incarnation:
                self.pace.add_load(version.name, proof.load_s, _clock(), is_reload=is_reload, busy=busy)
                self.proven.add(version, manifest)
                self._changed()
                if not is_reload:
                    self._emit(version, "VersionVerified", "is verified and served", once=f"verified/{version.name}")

    async def _failed(self, version: Version, loaded: LoadedAdapter, error: Exception) -> None:
        incarnation = self._engine.incarnation
        await self._unload(loaded)
        await self._adapter_cache.discard(version.adapter)
        if incarnation != self._engine.incarnation:
            return
        version.failure = failed_load(version.failure, error, _clock())
        self.proven.wake.set()
        if version.failure.retry_at is not None:
            self.proven.remove(version, VersionState.FAILED, _clock())
            _log.warning("%s is not served yet, attempt %d failed: %s", version.name, version.failure.attempts, error)
            return
        _log.error("%s is refused and never served", version.name, exc_info=error)
        self.proven.remove(version, VersionState.REFUSED, _clock())
        self._emit(version, "VersionRefused", f"is refused and never served: {error}")

    def _emit(self, version: Version, reason: str, text: str, once: str = "") -> None:
        adapter = version.adapter
        text = f"version {adapter.version} of agent {adapter.agent} {text}"
        self._emitter.queue(adapter.job_ref, reason, text, once=once)


def failed_load(before: FailedLoad | None, error: Exception, now: float) -> FailedLoad:
    """Return the record of a failed load: its error, the number of attempts, and when the next one is due.

    The load is retried, with exponential backoff up to LONGEST_WAIT_S, unless the error shows that the version itself is at fault.
    It is not at fault if the bus refuses the credentials (they are renewed), or if this machine lacks files, memory or threads.

    Args:
        before: record of the previous attempt; None if this was the first since the last successful load.
        error: of this attempt.
        now: time of the failure, in seconds.
    """
    attempts = 1 if before is None else before.attempts + 1
    may_succeed = isinstance(error, Retryable | BusRefused | OSError | MemoryError | RuntimeError)
    wait_s = min(FIRST_WAIT_S * 2 ** min(attempts - 1, 10), LONGEST_WAIT_S)
    return FailedLoad(error, attempts, now + wait_s if may_succeed else None)


def _as_resident(version: Version, slot: Slot, usage: float, now: float) -> Resident:
    """Describe a version that has a slot, as input of `paging.plan_pages`.

    Args:
        version: the version.
        slot: its slot.
        usage: tokens that its tenant has used, divided by the tenant's weight (`fair_queue`).
        now: time in seconds, on the loop's clock.
    """
    is_called = version.agent.may_call(version.adapter.version, now)
    return Resident(
        version.name,
        slot.loaded_at,
        slot.used_at,
        slot.num_running,
        slot.num_queued,
        is_ready=version.is_ready,
        is_current=version.is_current or is_called,
        is_strict=version.agent.is_strict and not is_called,
        usage=usage,
        has_served=version.has_served,
        is_yielding=version.state in (VersionState.YIELDING, VersionState.REVOKED),
    )


def _as_demand(version: Version, usage: float, now: float) -> PageDemand:
    """Describe a version that has no slot, as input of `paging.plan_pages`.

    Args:
        version: the version.
        usage: tokens that its tenant has used, divided by the tenant's weight (`fair_queue`).
        now: time in seconds, on the loop's clock.
    """
    # Once only: versions that no request uses would otherwise take the slots from each other for ever.
    is_successor = now - version.agent.used_at < IN_USE_S and not version.was_proven
    urgency = Urgency.SUCCESSOR if is_successor else Urgency.PREFETCH
    urgency = Urgency.WAITING if version.waiting is not None else urgency
    return PageDemand(version.name, urgency, version.has_served, usage)


def _clock() -> float:
    return asyncio.get_running_loop().time()
