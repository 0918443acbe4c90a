"""A rig for each test: nothing of an earlier test is left in the API server."""

from collections.abc import AsyncIterator

import pytest
from tests.operator.real.orchestrators import ScriptedOrchestrator
from tests.operator.real.rig import Rig, namespace, rigged

from marlaas_e2e.control_plane import ControlPlane


@pytest.fixture
async def rig(crds: ControlPlane) -> AsyncIterator[Rig]:
    async with rigged(crds) as rig:
        await rig.gateway.apply(namespace("team-a"))
        yield rig


@pytest.fixture
async def orchestrator(rig: Rig) -> AsyncIterator[ScriptedOrchestrator]:
    bus = await rig.connect_orchestrator()
    async with ScriptedOrchestrator(bus).running() as orchestrator:
        yield orchestrator
    await bus.close()
