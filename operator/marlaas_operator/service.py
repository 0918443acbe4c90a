"""The operator as a whole: wires cache, bus view, work queue and watches, from the first list to the drain."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from prometheus_client import Metric

from marlaas_api.bus import Bus
from marlaas_api.bus_users import CredentialIssuer
from marlaas_operator import heap
from marlaas_operator.bus_health import BusHealth
from marlaas_operator.cluster import Cluster, Resource, Target
from marlaas_operator.cluster.resources import KINDS, RLJOBS, TENANTS
from marlaas_operator.installation import Installation
from marlaas_operator.job_documents import JobDocuments
from marlaas_operator.metrics import OperatorMetrics
from marlaas_operator.object_cache import COUNT_AFTER_S, ObjectCache, after_bus_change
from marlaas_operator.observe import Observer
from marlaas_operator.reconcile import Performer, Reconciler, ReconcilerDependencies
from marlaas_operator.watching import Resync, sweep
from marlaas_operator.work_queue import WorkQueue

log = logging.getLogger(__name__)

BUS_PATIENCE_S = 10.0
DRAIN_S = 10.0

Watch = Callable[[ObjectCache, Callable[[Resource], None], Callable[[str], None]], Awaitable[None]]
"""Feeds the cache until cancelled.

The first callback receives each kind whose watch begins. The second receives an error text, empty once the
watch works again.
"""


@dataclass(frozen=True, slots=True)
class ExternalSystems:
    """External systems of the operator. instance: reporter name in events. now: unix seconds."""

    cluster: Cluster
    open_bus: Callable[[], Awaitable[Bus]]
    watch: Watch
    credentials: CredentialIssuer
    instance: str = "marlaas-operator"
    now: Callable[[], float] = time.time


class Service:
    """The operator: all its parts and background tasks."""

    def __init__(self, external: ExternalSystems, installation: Installation) -> None:
        self._external = external
        self.metrics = OperatorMetrics()
        self.cache = ObjectCache(installation.namespace)
        self.health = BusHealth(self._queue_all, external.now)
        self.documents = JobDocuments(external.open_bus, self.health, self._bus_changed, self._usage_changed)
        observer = Observer(
            self.cache,
            self.documents,
            self.health,
            external.credentials,
            external.now,
            require_tenant=installation.require_tenant,
        )
        performer = Performer(external.cluster, self.cache, self.documents)
        dependencies = ReconcilerDependencies(
            cluster=external.cluster,
            cache=self.cache,
            observer=observer,
            performer=performer,
            installation=installation,
            instance=external.instance,
            now=external.now,
        )
        self._observer = observer
        self.cache.gone = observer.forget
        self.cache.job_changed = observer.job_changed
        observer.shares_changed = self._shares_changed
        observer.room_found = self._room_found
        self._reconciler = Reconciler(dependencies)
        self.queue: WorkQueue[Target] = WorkQueue(self._reconciler, now=time.monotonic)
        self.queue.on_end = self._reconciled
        self.resync = Resync(external.cluster, self.cache)
        self._watch_error = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then finish the reconciles in progress, for at most `DRAIN_S`.

        Raises:
            ExceptionGroup: a background task failed: InvalidInput, or a bug.
        """
        async with asyncio.TaskGroup() as tasks:
            heap.configure()
            background = [
                tasks.create_task(self.documents.run(), name="bus"),
                tasks.create_task(heap.trim(), name="heap"),
            ]
            starting = tasks.create_task(self._start(), name="first lists")
            stopping = tasks.create_task(stop.wait(), name="stop")
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                working = tasks.create_task(self.queue.run(), name="queue")
                background += [
                    tasks.create_task(self.resync.run(), name="resync"),
                    tasks.create_task(self._sweep(), name="sweep"),
                    tasks.create_task(self._watch(), name="watch"),
                ]
                await stopping
                await self._drain(working)
            starting.cancel()
            for task in background:
                task.cancel()

    def missing(self) -> str:
        """Return the reason why the operator is not ready; empty when it is ready."""
        if not self.resync.synced.is_set():
            return "the first lists of the API server are not complete"
        return f"the watches ended: {self._watch_error}" if self._watch_error else ""

    def metric_families(self) -> Iterable[Metric]:
        """Return all metrics."""
        gauges = {
            "queue_depth": float(len(self.queue.schedule)),
            "queue_running": float(self.queue.schedule.running),
            "objects": float(len(self.cache)),
            "bus_available": float(self.health.state.available),
            "quiet_seconds": time.monotonic() - self.queue.started_at if self.resync.synced.is_set() else 0.0,
        }
        return self.metrics.families(gauges)

    async def _start(self) -> None:
        """List everything, wait up to `BUS_PATIENCE_S` for the bus, then queue every object.

        Without the wait, a restart of the operator would publish that the bus is unavailable.
        """
        await self.resync.first()
        # Not before: until everything was listed, a missing object may be unknown, not absent.
        self.cache.enqueue = self.queue.add
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BUS_PATIENCE_S):
                await self.health.usable.wait()
        self._queue_all()

    async def _sweep(self) -> None:
        await sweep(self._external.cluster, self.cache, self.documents, self.health)

    async def _watch(self) -> None:
        await self._external.watch(self.cache, self.resync.request, self._set_watch_error)

    def _set_watch_error(self, error: str) -> None:
        self._watch_error = error

    async def _drain(self, working: asyncio.Task[None]) -> None:
        self.queue.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await asyncio.shield(working)
        working.cancel()

    def _reconciled(self, target: Target, error: Exception | None, seconds: float) -> None:
        self.metrics.reconciled(target.resource.kind, "ok" if error is None else type(error).__name__, seconds)

    def _shares_changed(self) -> None:
        if self.resync.synced.is_set():
            for tenant in self.cache.targets(TENANTS):
                self.queue.add(tenant, COUNT_AFTER_S)

    def _room_found(self, target: Target) -> None:
        if self.resync.synced.is_set():
            self.queue.add(target)

    def _bus_changed(self, key: str) -> None:
        namespace, _, name = key.partition(".")
        self._observer.job_changed(Target(RLJOBS, namespace, name))
        if self.resync.synced.is_set():
            for target, delay_s in after_bus_change(self.cache, key):
                self.queue.add(target, delay_s)

    def _usage_changed(self, tenant: str) -> None:
        if self.resync.synced.is_set():
            target = Target(TENANTS, "", tenant)
            if self.cache.get(target) is not None:
                self.queue.add(target)

    def _queue_all(self) -> None:
        if self.resync.synced.is_set():
            for resource in KINDS:
                for target in self.cache.targets(resource):
                    self.queue.add(target)
