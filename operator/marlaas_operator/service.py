"""The operator as a whole: wires cache, bus view, work queue and watches, from the first list to the drain."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from prometheus_client import Metric

from marlaas_api.bus import Bus
from marlaas_operator.apply import Performer
from marlaas_operator.bus_health import BusHealth
from marlaas_operator.bus_keys import CredentialIssuer
from marlaas_operator.cluster import Body, Cluster, Resource, Target
from marlaas_operator.cluster.resources import KINDS, RLJOBS
from marlaas_operator.installation import Installation
from marlaas_operator.job_documents import JobDocuments
from marlaas_operator.metrics import OperatorMetrics
from marlaas_operator.object_cache import ObjectCache
from marlaas_operator.observe import Observer
from marlaas_operator.reconcile import Reconciler, ReconcilerDependencies
from marlaas_operator.resync import Resync, sweep
from marlaas_operator.routes import Wish, after_bus_change, after_change, sums
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
class Outside:
    """External systems of the operator. instance: reporter name in events. now: unix seconds."""

    cluster: Cluster
    open_bus: Callable[[], Awaitable[Bus]]
    watch: Watch
    credentials: CredentialIssuer
    instance: str = "marlaas-operator"
    now: Callable[[], float] = time.time


class Service:
    """The operator: all its parts and background tasks."""

    def __init__(self, outside: Outside, installation: Installation) -> None:
        self._outside = outside
        self.metrics = OperatorMetrics()
        self.cache = ObjectCache(self._cluster_changed, installation.namespace)
        self.health = BusHealth(self._everything, outside.now)
        self.documents = JobDocuments(outside.open_bus, self.health, self._bus_changed)
        observer = Observer(self.cache, self.documents, self.health, outside.credentials, outside.now)
        performer = Performer(outside.cluster, self.cache, self.documents)
        around = ReconcilerDependencies(
            cluster=outside.cluster,
            cache=self.cache,
            observer=observer,
            performer=performer,
            installation=installation,
            instance=outside.instance,
            now=outside.now,
        )
        self._observer = observer
        self._reconciler = Reconciler(around)
        self.queue: WorkQueue[Target] = WorkQueue(self._reconcile, now=time.monotonic)
        self.resync = Resync(outside.cluster, self.cache)
        self._looked_at = time.monotonic()
        self._watch_trouble = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then finish the reconciles in progress, for at most `DRAIN_S`.

        Raises:
            ExceptionGroup: a background task failed: InvalidInput, or a bug.
        """
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self.documents.run(), name="bus")]
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
        return f"the watches ended: {self._watch_trouble}" if self._watch_trouble else ""

    def metric_families(self) -> Iterable[Metric]:
        """Return all metrics."""
        gauges = {
            "queue_depth": float(len(self.queue.schedule)),
            "queue_running": float(self.queue.schedule.running),
            "objects": float(len(self.cache)),
            "bus_available": float(self.health.state.available),
            "quiet_seconds": time.monotonic() - self._looked_at if self.resync.synced.is_set() else 0.0,
        }
        return self.metrics.families(gauges)

    async def _start(self) -> None:
        """List everything, wait up to `BUS_PATIENCE_S` for the bus, then queue every object.

        Without the wait, a restart of the operator would publish that the bus is unavailable.
        """
        await self.resync.first()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BUS_PATIENCE_S):
                await self.health.usable.wait()
        self._everything()

    async def _sweep(self) -> None:
        await sweep(self._outside.cluster, self.cache, self.documents, self.health)

    async def _watch(self) -> None:
        await self._outside.watch(self.cache, self.resync.want, self._watch_told)

    def _watch_told(self, words: str) -> None:
        self._watch_trouble = words

    async def _drain(self, working: asyncio.Task[None]) -> None:
        self.queue.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):
                await asyncio.shield(working)
        working.cancel()

    async def _reconcile(self, target: Target) -> float | None:
        began = time.perf_counter()
        self._looked_at = time.monotonic()
        phase, outcome = self._phase(target), "ok"
        try:
            return await self._reconciler(target)
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self.metrics.reconciled(target.resource.kind, outcome, time.perf_counter() - began)
            if phase != self._phase(target):  # own writes trigger no callback
                self._look_at(sums(self.cache, self.cache.get(target), None))

    def _phase(self, target: Target) -> str | None:
        """Return the phase in a job's status; None for other kinds."""
        body = self.cache.get(target) if target.resource == RLJOBS else None
        return (body.get("status") or {}).get("phase") if body is not None else None

    def _everything(self) -> None:
        for resource in KINDS:
            self._look_at((target, 0.0) for target in self.cache.targets(resource))

    def _cluster_changed(self, target: Target, before: Body | None, after: Body | None) -> None:
        self._look_at(after_change(self.cache, target, before, after))
        if before is not None and target.resource in KINDS and not _is_same(before, after):
            self._observer.forget(before)

    def _bus_changed(self, key: str) -> None:
        self._look_at(after_bus_change(self.cache, key))

    def _look_at(self, wishes: Iterable[Wish]) -> None:
        """Queue the objects, unless the first lists are incomplete.

        Until everything was listed, a missing object may be unknown, not absent.
        """
        if self.resync.synced.is_set():
            for target, delay_s in wishes:
                self.queue.add(target, delay_s)


def _is_same(before: Body, after: Body | None) -> bool:
    """Return whether both bodies have the same uid, so are not two objects of the same name."""
    return after is not None and before["metadata"]["uid"] == after["metadata"]["uid"]
