"""Adapter versions in the engine: loads and evicts them, and gives them to requests.

Invariant: a version is given to requests only after its proof and before its unloading, in one incarnation of
the engine. The newest version of every served agent is loaded before any request for it. Other versions are
loaded on request, and evicted when their slot is needed. If possible one slot stays free, so that a new version
need not wait for an unload.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass

from marlaas_api.errors import Permanent
from marlaas_api.messages import Manifest
from marlaas_api.names import AdapterRef, JobRef
from marlaas_worker.job_events import EventEmitter
from marlaas_worker.role import wait_for
from marlaas_worker.rollout.adapter_cache import AdapterCache
from marlaas_worker.rollout.engine import Engine, EngineDown, LoadedAdapter, LoadFailed
from marlaas_worker.rollout.retries import Retries
from marlaas_worker.rollout.slots import SlotTable
from marlaas_worker.rollout.supervision import SupervisedEngine
from marlaas_worker.rollout.waits import Waits, to_yield

_SPARE = ""
_REVIEW_S = 60.0
_log = logging.getLogger(__name__)

LoadProven = Callable[[Engine, Manifest, LoadedAdapter], Awaitable[object]]


class VersionRefused(Permanent):
    """A version that failed its proof or that the engine refused; it is never served."""


@dataclass(frozen=True, slots=True)
class Held:
    """A proven version while a request runs on it. incarnation: the engine incarnation in which it was proven."""

    loaded: LoadedAdapter
    manifest: Manifest
    incarnation: int


class Versions:
    """Reconciles the engine's slots with the newest and the requested versions.

    `changed` is called when the proven set changes.
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
        self._table = SlotTable(engine.limits.slots, engine.slot_numbers)
        self._retries = Retries()
        self._newest: dict[AdapterRef, AdapterRef] = {}
        self._wake = asyncio.Event()
        self._waits = Waits(self._wake.set)
        self._resident: dict[str, AdapterRef] = {}
        self._ready: dict[str, Manifest] = {}
        self._yielding: frozenset[str] = frozenset()
        self._leftover: list[AdapterRef] = []
        self._loading: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()

    @property
    def verified(self) -> tuple[str, ...]:
        """Engine names of the versions that may be served now."""
        return tuple(self._ready)

    def prefer(self, newest: Iterable[AdapterRef]) -> None:
        """Set the newest version of every served agent."""
        self._newest = {adapter.at(0): adapter for adapter in newest}
        self._wake.set()
        self._tell_news()

    @contextlib.asynccontextmanager
    async def hold(self, adapter: AdapterRef) -> AsyncIterator[Held]:
        """Wait for a proven version, and prevent its unloading while the context is open. Raises VersionRefused."""
        held = await self._acquire(adapter)
        try:
            yield held
        finally:
            self._table.release(held.loaded)
            if self._waits:
                self._wake.set()

    async def newest_verified(self, agent: AdapterRef) -> int:
        """Return the newest proven version of an agent; wait for the first one. Raises VersionRefused.

        agent: an adapter of the agent at any version.
        """
        while True:
            proven = [ref.version for name, ref in self._resident.items() if name in self._ready and _same(ref, agent)]
            if proven:
                return max(proven)
            newest = self._newest.get(agent.at(0))
            if newest is None:
                await self._news.wait()
            else:
                self._raise_refusal(newest.engine_name)
                await self._waits.wait(newest)

    def explain(self, adapter: AdapterRef) -> str:
        """Return why a version is not served yet, for people."""
        name = adapter.engine_name
        if (trouble := self._retries.trouble(name)) is not None:
            return f"the last attempt failed: {trouble.error}"
        if not self._engine.up:
            return "the engine is restarting"
        if name in self._resident:
            return "it is being loaded and proven"
        return f"no free slot: all {self._table.num_slots} hold versions in use"

    def engine_stopped(self) -> None:
        """Discard all state of the engine's incarnation: nothing is loaded or proven any more."""
        for load in self._loading:
            load.cancel()
        self._leftover += self._resident.values()
        self._table.clear()
        self._retries.clear()
        self._resident.clear()
        self._ready.clear()
        self._yielding = frozenset()
        self._changed()

    def engine_restarted(self) -> None:
        """Start loading again, into the empty engine."""
        self._wake.set()

    async def reconcile(self) -> None:
        """Load and evict versions, until cancelled."""
        async with asyncio.TaskGroup() as loads:
            while True:
                self._wake.clear()
                if self._engine.up:
                    await self._step(loads)
                await wait_for(self._wake, self._until_retry())

    async def _acquire(self, adapter: AdapterRef) -> Held:
        name = adapter.engine_name
        while True:
            self._raise_refusal(name)
            loaded = None if name in self._yielding else self._table.acquire(name)
            if loaded is not None:
                return Held(loaded, self._ready[name], self._engine.incarnation)
            await self._waits.wait(adapter)

    def _raise_refusal(self, name: str) -> None:
        if (refusal := self._retries.refusal(name)) is not None:
            raise VersionRefused(f"{name} is refused: {refusal}") from refusal

    async def _step(self, loads: asyncio.TaskGroup) -> None:
        """Run one round: evict, load, and release requests whose version is ready. Returns early if the engine goes down."""
        incarnation = self._engine.incarnation
        while self._leftover:
            await self._adapter_cache.discard(self._leftover.pop())
        wanted = self._wanted()
        plan = self._table.plan([*wanted, _SPARE])
        for adapter in plan.unload:
            if incarnation == self._engine.incarnation:
                await self._give_up(adapter)
        if incarnation != self._engine.incarnation:
            return
        for name in plan.load:
            if name != _SPARE:
                self._begin(loads, wanted[name])
        running = [name for name in self._ready if self._table.running(name)]
        self._yielding = to_yield(running, self._resident, self._waits)
        for name in self._waits:
            if name in self._ready and name not in self._yielding:
                self._settle(name)

    def _wanted(self) -> dict[str, AdapterRef]:
        """Return the wanted versions by urgency.

        Requested versions come first, in order of request. Then come the newest versions, resident ones first,
        so that newest versions do not evict each other.
        """
        now = _clock()
        newest = sorted(self._newest.values(), key=lambda ref: ref.engine_name not in self._resident)
        refs = [*self._waits.adapters(), *newest]
        return {ref.engine_name: ref for ref in refs if self._retries.may_try(ref.engine_name, now)}

    def _until_retry(self) -> float:
        wanted = {*self._waits, *(ref.engine_name for ref in self._newest.values())}
        due_s = self._retries.next_in_s(wanted, _clock())
        return _REVIEW_S if due_s is None or not self._engine.up else due_s

    def _begin(self, loads: asyncio.TaskGroup, adapter: AdapterRef) -> None:
        name = adapter.engine_name
        loaded = self._table.begin(name, self._adapter_cache.place(adapter))
        self._resident[name] = adapter
        load = loads.create_task(self._bring_in(adapter, loaded), name=f"load {name}")
        self._loading.add(load)
        load.add_done_callback(self._loading.discard)

    async def _give_up(self, loaded: LoadedAdapter) -> None:
        adapter = self._resident.pop(loaded.name)
        self._table.drop(loaded)
        self._ready.pop(loaded.name, None)
        self._changed()
        await self._unload(loaded)
        await self._adapter_cache.discard(adapter)

    async def _unload(self, loaded: LoadedAdapter) -> None:
        incarnation = self._engine.incarnation
        try:
            await self._engine.unload(loaded)
        except EngineDown:
            return
        except LoadFailed as error:
            self._engine.report(incarnation, f"its slots are not what they should be: {error}")

    async def _bring_in(self, adapter: AdapterRef, loaded: LoadedAdapter) -> None:
        """Load and prove a version. On any error the version is not served, and the role continues."""
        incarnation = self._engine.incarnation
        try:
            manifest = await self._adapter_cache.manifest(adapter)
            await self._adapter_cache.fetch(manifest)
            await self._load_proven(self._engine, manifest, loaded)
        except Exception as error:
            if incarnation == self._engine.incarnation:
                await self._failed(adapter, loaded, error)
        else:
            if incarnation == self._engine.incarnation:
                self._serve(adapter, loaded, manifest)

    def _serve(self, adapter: AdapterRef, loaded: LoadedAdapter, manifest: Manifest) -> None:
        name = adapter.engine_name
        self._table.ready(loaded)
        self._ready[name] = manifest
        self._retries.succeeded(name)
        self._settle(name)
        self._changed()
        self._wake.set()
        said = f"version {adapter.version} of agent {adapter.agent} is verified and served"
        self._emitter.queue(_job(adapter), "VersionVerified", said, once=f"verified/{name}")

    async def _failed(self, adapter: AdapterRef, loaded: LoadedAdapter, error: Exception) -> None:
        incarnation = self._engine.incarnation
        await self._unload(loaded)
        await self._adapter_cache.discard(adapter)
        if incarnation != self._engine.incarnation:
            return
        name = adapter.engine_name
        self._table.drop(loaded)
        del self._resident[name]
        trouble = self._retries.failed(name, error, _clock())
        self._wake.set()
        if trouble.retry_at is not None:
            _log.warning("%s is not served yet, attempt %d: %s", name, trouble.attempts, error)
            return
        _log.error("%s is refused and never served", name, exc_info=error)
        self._settle(name)
        said = f"version {adapter.version} of agent {adapter.agent} is refused and never served: {error}"
        self._emitter.queue(_job(adapter), "VersionRefused", said)

    def _settle(self, name: str) -> None:
        self._waits.settle(name)
        self._tell_news()

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _clock() -> float:
    return asyncio.get_running_loop().time()


def _same(one: AdapterRef, other: AdapterRef) -> bool:
    return one.at(0) == other.at(0)


def _job(adapter: AdapterRef) -> JobRef:
    return JobRef(adapter.namespace, adapter.job, adapter.uid)
