"""A rig for each test: nothing of an earlier test is left in the API server."""

from collections.abc import AsyncIterator

import pytest
from tests.operator.objects import namespace
from tests.operator.real.harness import OperatorHarness, rigged
from tests.operator.real.orchestrators import ScriptedOrchestrator
from tests.operator.real.proxy import Proxy

from marlaas_e2e.control_plane import ControlPlane


@pytest.fixture
async def harness(crds: ControlPlane) -> AsyncIterator[OperatorHarness]:
    async with rigged(crds) as harness:
        await harness.gateway.apply(namespace("team-a"))
        yield harness


@pytest.fixture
async def orchestrator(harness: OperatorHarness) -> AsyncIterator[ScriptedOrchestrator]:
    bus = await harness.connect_orchestrator()
    async with ScriptedOrchestrator(bus).running() as orchestrator:
        yield orchestrator
    await bus.close()


@pytest.fixture
async def proxy(harness: OperatorHarness) -> AsyncIterator[Proxy]:
    async with Proxy(harness.plane).running() as proxy:
        yield proxy
