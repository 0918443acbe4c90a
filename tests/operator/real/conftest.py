"""A rig for each test: nothing of an earlier test is left in the API server."""

from collections.abc import AsyncIterator
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest
from tests.operator.objects import namespace
from tests.operator.real.harness import OperatorHarness, rigged
from tests.operator.real.orchestrators import ScriptedOrchestrator
from tests.operator.real.proxy import Proxy

from marlaas_e2e import binaries
from marlaas_e2e.control_plane import ControlPlane

get_temp_dir()  # now, so that it does not lie in the tests' folder of temporary files, which goes before the processes' server


@pytest.fixture(scope="session")
def helm() -> Path:
    """The real helm, which renders the operator's rights."""
    return binaries.ensure(["helm"])["helm"]


@pytest.fixture
async def harness(control_plane: ControlPlane) -> AsyncIterator[OperatorHarness]:
    async with rigged(control_plane) as harness:
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
