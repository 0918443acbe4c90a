"""What every bus promises is asked of JetStream through the gateway and of the fake."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.api.bus_contract.asking import BRIEF, FORGETFUL, FULL, KEEPING, Connect

from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_nats import connect
from marlaas_api.nats_server import EmbeddedNats
from tests import virtual_time

virtual = virtual_time.event_loop_policy


@pytest.fixture
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """Virtual time for the fake."""
    is_fake = request.node.callspec.params["dial"] == "memory"
    return request.getfixturevalue("virtual") if is_fake else asyncio.DefaultEventLoopPolicy()


@pytest.fixture(scope="package")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture(params=["nats", "memory"])
async def dial(request: pytest.FixtureRequest, nats_url: str) -> AsyncIterator[Connect]:
    """Opens clients of one server."""
    opened: list[Bus] = []
    memory = MemoryServer(virtual_time.now)

    async def open_one(name: str) -> Bus:
        bus: Bus = memory.connect(name) if request.param == "memory" else await connect(nats_url, name=name)
        opened.append(bus)
        return bus

    first = await open_one("first")
    await first.ensure((*subjects.STREAMS, FULL, FORGETFUL, KEEPING), (*subjects.BUCKETS, BRIEF))  # type: ignore[call-arg]
    yield open_one
    for bus in opened:
        await bus.close()


@pytest.fixture
async def bus(dial: Connect) -> Bus:
    return await dial("bus")


@pytest.fixture
def ns() -> str:
    """A namespace that no other test uses."""
    return f"ns-{uuid.uuid4().hex[:12]}"
