"""Adapter versions in the engine: loads and proves them, retries failed loads, and evicts them.

Invariant: a version is given to requests (`slots.ProvenVersions`) only after its proof and before its unloading, in
one incarnation of the engine. The newest version of every served agent is loaded before any request for it. Other
versions are loaded on request, and evicted when their slot is needed. If possible one slot stays free, so that a new
version need not wait for an unload.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from marlaas_api.errors import Retryable
from marlaas_api.messages import Manifest
from marlaas_api.names import AdapterRef, JobRef
from marlaas_worker.job_events import EventEmitter
from marlaas_worker.role import wait_for
from marlaas_worker.rollout.adapter_cache import AdapterCache
from marlaas_worker.rollout.engine import Engine, EngineDown, LoadedAdapter, LoadFailed
from marlaas_worker.rollout.slots import Held, ProvenVersions
from marlaas_worker.rollout.supervised_engine import SupervisedEngine

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 10.0
"""First and longest backoff after a failed load."""
_SPARE = ""
_REVIEW_S = 60.0
_log = logging.getLogger(__name__)

LoadProven = Callable[[Engine, Manifest, LoadedAdapter], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """The last failed attempt. retry_at: when the next attempt is due; None: never."""

    error: Exception
    attempts: int
    retry_at: float | None


@dataclass(slots=True)
class Retries:
    """Failed loads by version, kept until an attempt succeeds or `clear` is called. The caller passes the clock."""

    _failures: dict[str, FailedLoad] = field(default_factory=dict)

    def failed(self, name: str, error: Exception, now: float) -> FailedLoad:
        """Note a failed attempt. Only a Retryable error is retried, with exponential backoff up to LONGEST_WAIT_S."""
        attempts = self._failures[name].attempts + 1 if name in self._failures else 1
        wait_s = min(FIRST_WAIT_S * 2 ** min(attempts - 1, 10), LONGEST_WAIT_S)
        retry_at = now + wait_s if isinstance(error, Retryable) else None
        self._failures[name] = FailedLoad(error, attempts, retry_at)
        return self._failures[name]

    def succeeded(self, name: str) -> None:
        """Forget a name's failures."""
        self._failures.pop(name, None)

    def clear(self) -> None:
        """Forget all failures."""
        self._failures.clear()

    def failure(self, name: str) -> FailedLoad | None:
        """Return the last failure since the last success; None if there is none."""
        return self._failures.get(name)

    def may_try(self, name: str, now: float) -> bool:
        """Return whether an attempt is due."""
        failure = self._failures.get(name)
        return failure is None or (failure.retry_at is not None and failure.retry_at <= now)

    def next_in_s(self, names: Iterable[str], now: float) -> float | None:
        """Return the seconds until the first retry of these names is due; None if none of them waits for a retry."""
        failures = (self._failures.get(name) for name in names)
        due = [failure.retry_at - now for failure in failures if failure is not None and failure.retry_at is not None]
        return max(0.0, min(due)) if due else None


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
        self.proven = ProvenVersions(engine.limits.slots, engine.slot_numbers)
        self._retries = Retries()
        self._resident: dict[str, AdapterRef] = {}
        self._to_discard: list[AdapterRef] = []
        self._loading: set[asyncio.Task[None]] = set()

    def explain(self, adapter: AdapterRef) -> str:
        """Return why a version is not served yet, for people."""
        name = adapter.engine_name
        if (failure := self._retries.failure(name)) is not None:
            return f"the last attempt failed: {failure.error}"
        if not self._engine.up:
            return "the engine is restarting"
        if name in self._resident:
            return "it is being loaded and proven"
        return f"no free slot: all {self.proven.table.num_slots} hold versions in use"

    def engine_stopped(self) -> None:
        """Discard all state of the engine's incarnation: nothing is loaded or proven any more."""
        for load in self._loading:
            load.cancel()
        self._to_discard += self._resident.values()
        self._resident.clear()
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
                await wait_for(self.proven.wake, self._until_retry())

    async def _step(self, loads: asyncio.TaskGroup) -> None:
        """Run one round: evict, load, and release requests whose version is ready. Returns early if the engine goes down."""
        incarnation = self._engine.incarnation
        while self._to_discard:
            await self._adapter_cache.discard(self._to_discard.pop())
        wanted = self._wanted()
        plan = self.proven.table.plan([*wanted, _SPARE])
        for adapter in plan.unload:
            if incarnation == self._engine.incarnation:
                await self._evict(adapter)
        if incarnation != self._engine.incarnation:
            return
        for name in plan.load:
            if name != _SPARE:
                self._begin(loads, wanted[name])
        self.proven.share_slots()

    def _wanted(self) -> dict[str, AdapterRef]:
        """Return the wanted versions by urgency.

        Requested versions come first, in order of request. Then come the newest versions, resident ones first,
        so that newest versions do not evict each other.
        """
        now = _clock()
        newest = sorted(self.proven.newest.values(), key=lambda ref: ref.engine_name not in self._resident)
        refs = [*self.proven.waits.adapters(), *newest]
        return {ref.engine_name: ref for ref in refs if self._retries.may_try(ref.engine_name, now)}

    def _until_retry(self) -> float:
        wanted = {*self.proven.waits, *(ref.engine_name for ref in self.proven.newest.values())}
        due_s = self._retries.next_in_s(wanted, _clock())
        return _REVIEW_S if due_s is None or not self._engine.up else due_s

    def _begin(self, loads: asyncio.TaskGroup, adapter: AdapterRef) -> None:
        name = adapter.engine_name
        loaded = self.proven.table.begin(name, self._adapter_cache.place(adapter))
        self._resident[name] = adapter
        load = loads.create_task(self._load(adapter, loaded), name=f"load {name}")
        self._loading.add(load)
        load.add_done_callback(self._loading.discard)

    async def _evict(self, loaded: LoadedAdapter) -> None:
        adapter = self._resident.pop(loaded.name)
        self.proven.remove(loaded)
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
            self._engine.report(
                incarnation, f"it cannot unload {loaded.name}, so its slots are not as expected: {error}"
            )

    async def _load(self, adapter: AdapterRef, loaded: LoadedAdapter) -> None:
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
                self._serve(adapter, Held(loaded, manifest, incarnation))

    def _serve(self, adapter: AdapterRef, held: Held) -> None:
        name = adapter.engine_name
        self._retries.succeeded(name)
        self.proven.add(held)
        self._changed()
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
