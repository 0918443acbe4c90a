"""Adapter versions in the engine: loads and proves them, retries failed loads, and evicts them.

Invariant: a version is given to requests (`slots.ProvenVersions`) only after its proof and before its unloading, in
one incarnation of the engine. Which versions are loaded and evicted is decided in `paging`.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from marlaas_api.messages import Manifest
from marlaas_api.names import AdapterRef, JobRef
from marlaas_worker.job_events import EventEmitter
from marlaas_worker.role import wait_for
from marlaas_worker.rollout.adapter_cache import AdapterCache
from marlaas_worker.rollout.engine import Engine, EngineDown, LoadedAdapter, LoadFailed
from marlaas_worker.rollout.load_retries import Retries
from marlaas_worker.rollout.paging import plan_pages
from marlaas_worker.rollout.paging_inputs import PagingInputs
from marlaas_worker.rollout.proof import Proof
from marlaas_worker.rollout.reload_pace import ReloadPace
from marlaas_worker.rollout.slot_seconds import SlotSeconds
from marlaas_worker.rollout.slots import Held, ProvenVersions
from marlaas_worker.rollout.supervised_engine import SupervisedEngine

_REVIEW_S = 60.0
_MIN_REVIEW_S = 0.005
_log = logging.getLogger(__name__)


class LoadProven(Protocol):
    """See `proof.load_proven`."""

    async def __call__(
        self, engine: Engine, manifest: Manifest, adapter: LoadedAdapter, *, probes: bool = True
    ) -> Proof: ...


class Versions:
    """Reconciles the engine's slots with the newest and the requested versions.

    `changed` is called when the proven set changes.

    Attributes:
        pace: load times of this engine, and the time that re-loads may take.
        slot_seconds: for which each agent's versions had slots.
    """

    def __init__(
        self,
        engine: SupervisedEngine,
        adapter_cache: AdapterCache,
        load_proven: LoadProven,
        emitter: EventEmitter,
        changed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._adapter_cache = adapter_cache
        self._load_proven = load_proven
        self._emitter = emitter
        self._changed = changed
        self.proven = ProvenVersions(engine.limits.slots, engine.slot_numbers)
        self.pace = ReloadPace()
        self.slot_seconds = SlotSeconds()
        self._retries = Retries()
        self._inputs = PagingInputs(self.proven, self._retries, engine.limiter.usage)
        self._review_s = _REVIEW_S
        self._resident: dict[str, AdapterRef] = {}
        self._to_discard: list[AdapterRef] = []
        self._loading: set[asyncio.Task[None]] = set()
        self._unloading: dict[str, asyncio.Task[None]] = {}

    def explain(self, adapter: AdapterRef) -> str:
        """Return why a version is not served yet, for people."""
        name = adapter.engine_name
        if (failure := self._retries.failure(name)) is not None:
            return f"the last attempt failed: {failure.error}"
        if not self._engine.up:
            return "the engine is restarting"
        if not self._inputs.is_committed(adapter):
            return "its trainer has not committed it yet"
        if name in self._resident:
            return "it is being loaded and proven"
        return f"no free slot: all {self.proven.table.num_slots} hold versions in use or needed soon"

    def forget(self, uids: Collection[str]) -> None:
        """Forget the failed loads of jobs that are gone."""
        self._retries.forget(uids)
        self.proven.forget(uids)
        self.slot_seconds.forget(uids)

    def engine_stopped(self) -> None:
        """Discard all state of the engine's incarnation: nothing is loaded or proven any more."""
        for load in self._loading:
            load.cancel()
        self._to_discard += self._resident.values()
        self._resident.clear()
        self.slot_seconds.end_all(_clock())
        self.pace.forget_expected()
        self._retries.clear()
        self.proven.clear()
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
        """Run one round: begin evictions and loads, and release requests whose version is ready."""
        while self._to_discard:
            await self._adapter_cache.discard(self._to_discard.pop())
        if not self._engine.up:
            return  # It has failed meanwhile. A load would begin now, and could take a slot from the next self-test.
        now = _clock()
        wanted = self._inputs.wanted(now)
        residents = self._inputs.residents(self._resident, now)
        demands = self._inputs.demands((ref for name, ref in wanted.items() if name not in self._resident), now)
        plan = plan_pages(self.proven.table.num_slots, residents, demands, self.pace, now)
        self._review_s = plan.review_s
        self.proven.yield_slots(plan.yielding, plan.revoked)
        self.proven.is_short = plan.is_short
        for name in plan.evict:
            self._evict(loads, *self._take_out(name))
        for name in plan.expected:
            self.pace.expect(name, now)
        for name in plan.load:
            self._begin(loads, wanted[name])

    def _until_review(self) -> float:
        """Return the seconds until the next round, unless something wakes it earlier."""
        if not self._engine.up:
            return _REVIEW_S
        due_s = self._inputs.next_retry_s(_clock())
        return max(_MIN_REVIEW_S, min(_REVIEW_S, self._review_s, _REVIEW_S if due_s is None else due_s))

    def _begin(self, loads: asyncio.TaskGroup, adapter: AdapterRef) -> None:
        name = adapter.engine_name
        loaded = self.proven.table.begin(name, self._adapter_cache.place(adapter))
        self._resident[name] = adapter
        self.slot_seconds.begin(adapter, _clock())
        load = loads.create_task(self._load(adapter, loaded), name=f"load {name}")
        self._loading.add(load)
        load.add_done_callback(self._loading.discard)

    def _evict(self, evictions: asyncio.TaskGroup, adapter: AdapterRef, loaded: LoadedAdapter) -> None:
        """Begin to unload a version. Loads that begin later wait for it, so that the engine has a free slot for them."""

        async def unload() -> None:
            try:
                await self._unload(loaded)
                await self._adapter_cache.discard(adapter)
            finally:
                del self._unloading[loaded.name]

        self._unloading[loaded.name] = evictions.create_task(unload(), name=f"unload {loaded.name}")

    async def _evicted(self, names: Iterable[str]) -> None:
        """Wait until these versions, as far as they are being evicted, have left the engine and their files are removed."""
        evictions = [self._unloading[name] for name in names if name in self._unloading]
        if evictions:
            await asyncio.wait(evictions)

    def _take_out(self, name: str) -> tuple[AdapterRef, LoadedAdapter]:
        """Stop giving a version to requests, before its slot is freed in the engine."""
        loaded = self.proven.table.loaded(name)
        self.proven.remove(loaded)
        self._changed()
        self.slot_seconds.end(name, _clock())
        return self._resident.pop(name), loaded

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

    async def _load(self, adapter: AdapterRef, loaded: LoadedAdapter) -> None:
        """Load and prove a version. On any error the version is not served, and the role continues."""
        incarnation, is_reload = self._engine.incarnation, self.proven.has_served(adapter)
        was_proven, evicted_before = self.proven.was_proven(adapter), tuple(self._unloading)
        is_free = not self.proven.table.num_running
        try:
            manifest = await self._adapter_cache.manifest(adapter)
            await self._evicted([loaded.name])  # Its files would be removed while they are read.
            await self._adapter_cache.fetch(manifest)
            await self._evicted(evicted_before)
            proof = await self._load_proven(self._engine, manifest, loaded, probes=not was_proven)
        except Exception as error:
            if incarnation == self._engine.incarnation:
                await self._failed(adapter, loaded, error)
        else:
            if incarnation == self._engine.incarnation:
                self.pace.note(loaded.name, proof.load_s, _clock(), is_reload=is_reload, is_free=is_free)
                self._serve(adapter, Held(loaded, manifest), is_reload)

    def _serve(self, adapter: AdapterRef, held: Held, is_reload: bool) -> None:
        name = adapter.engine_name
        self._retries.succeeded(name)
        self.proven.add(held)
        self._changed()
        if not is_reload:
            text = f"version {adapter.version} of agent {adapter.agent} is verified and served"
            self._emitter.queue(_job(adapter), "VersionVerified", text, once=f"verified/{name}")

    async def _failed(self, adapter: AdapterRef, loaded: LoadedAdapter, error: Exception) -> None:
        incarnation = self._engine.incarnation
        await self._unload(loaded)
        await self._adapter_cache.discard(adapter)
        if incarnation != self._engine.incarnation:
            return
        name = adapter.engine_name
        self.proven.remove(loaded)
        del self._resident[name]
        self.slot_seconds.end(name, _clock())
        failure = self._retries.failed(name, error, _clock())
        self.proven.wake.set()
        if failure.retry_at is not None:
            _log.warning("%s is not served yet, attempt %d failed: %s", name, failure.attempts, error)
            return
        _log.error("%s is refused and never served", name, exc_info=error)
        self.proven.refuse(name, error)
        text = f"version {adapter.version} of agent {adapter.agent} is refused and never served: {error}"
        self._emitter.queue(_job(adapter), "VersionRefused", text)


def _clock() -> float:
    return asyncio.get_running_loop().time()


def _job(adapter: AdapterRef) -> JobRef:
    return JobRef(adapter.namespace, adapter.job, adapter.uid)
