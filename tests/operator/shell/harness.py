"""The whole operator in one process, between the fakes of API server and bus: fast, for what needs no real server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.operator.objects import SYSTEM, installation, job, pool
from tests.operator.real.orchestrators import ADMITTED, ScriptedOrchestrator

from marlaas_api.bus import Bus
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_users import BusKeys, CredentialIssuer
from marlaas_operator.cluster import Body, Resource, Target
from marlaas_operator.cluster.memory import MemoryCluster
from marlaas_operator.cluster.resources import RLJOBS, target_of
from marlaas_operator.object_cache import ObjectCache
from marlaas_operator.service import ExternalSystems, Service

ONE = Target(RLJOBS, "team-a", "one")


class ServiceHarness:
    """Fakes around one operator."""

    def __init__(
        self, beside: "ServiceHarness | None" = None, now: Callable[[], float] | None = None, **settings: object
    ) -> None:
        """beside: an operator whose cluster, bus and keys are this one's, too. now: unix seconds; None: by the loop's clock. settings: of the installation."""
        loop = asyncio.get_running_loop()
        self.cluster = beside.cluster if beside else MemoryCluster("team-a", SYSTEM)
        self.server = beside.server if beside else MemoryServer()
        self.changed = asyncio.Event()
        self.cluster.listeners.append(lambda what, body: self.changed.set())
        self.issuer = beside.issuer if beside else CredentialIssuer(BusKeys.make(), lambda: 1.8e9)
        now = now or (lambda: 1.8e9 + loop.time())
        external = ExternalSystems(self.cluster, self._open_bus, self._watch, self.issuer, now=now)
        self.service = Service(external, installation(**settings))
        self.stop = asyncio.Event()

    async def _open_bus(self) -> Bus:
        return self.server.connect("operator")

    async def _watch(self, cache: ObjectCache, begun: Callable[[Resource], None], report: object) -> None:
        def hear(what: str, body: Body) -> None:
            target = target_of(body)
            if what == "DELETED":
                cache.lose(target, body["metadata"]["uid"])
            else:
                cache.see(body)

        self.cluster.listeners.append(hear)
        await asyncio.Event().wait()

    async def until(self, look: Callable[[], bool], what: str) -> None:
        """Wait for a change of the cluster that makes it so."""
        try:
            async with asyncio.timeout(400):
                while not look():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(f"not {what}: {self.status()}") from None

    def status(self, target: Target = ONE) -> Body:
        body = self.cluster._objects.get(target) or {}
        return dict(body.get("status") or {})

    def count(self, verb: str, plural: str = "") -> int:
        return sum(called == verb and target.resource.plural == plural for called, target in self.cluster.calls)


@asynccontextmanager
async def playing(harness: ServiceHarness) -> AsyncIterator[ScriptedOrchestrator]:
    bus = harness.server.connect("orchestrator")
    await bus.ensure()
    async with ScriptedOrchestrator(bus).running() as orchestrator:
        task = asyncio.create_task(harness.service.run(harness.stop))
        try:
            yield orchestrator
        finally:
            harness.stop.set()
            async with asyncio.timeout(20):
                await task


@asynccontextmanager
async def queued_job(harness: ServiceHarness, **spec: object) -> AsyncIterator[ScriptedOrchestrator]:
    """An operator with the pool `tiny` and the job `team-a/one`, once the job is queued."""
    await harness.cluster.create(pool("tiny"))
    await harness.cluster.create(job("team-a", "one", "tiny", **spec))
    async with playing(harness) as orchestrator:
        await harness.until(lambda: harness.status().get("phase") == "Queued", "queued")
        yield orchestrator


@asynccontextmanager
async def running_job(harness: ServiceHarness, **spec: object) -> AsyncIterator[ScriptedOrchestrator]:
    """The same, once the job is admitted and runs."""
    async with queued_job(harness, **spec) as orchestrator:
        await orchestrator.say("team-a", "one", **ADMITTED)
        await harness.until(lambda: harness.status().get("phase") == "Running", "running")
        yield orchestrator


async def in_time(look: Callable[[], object]) -> None:
    """Wait, in virtual time, for what has no event."""
    async with asyncio.timeout(400):
        while not look():  # noqa: ASYNC110
            await asyncio.sleep(1)
