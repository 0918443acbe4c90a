"""How the contract asks: nothing waits for ever, and what differs between two answers is not compared.

The fake's time is virtual. A real server's timers are real: tests wait for what they cause, and assert no upper bound.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from marlaas_api import subjects
from marlaas_api.bus import Bus, Consumer, Delivery, Entry
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_nats import connect
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.subjects import BucketSpec, StreamSpec
from tests import virtual_time

T = TypeVar("T")
Connect = Callable[[str], Awaitable[Bus]]

FULL = StreamSpec("FULL", ("full.*",), work_queue=True, max_bytes=4096)
FORGETFUL = StreamSpec("FORGETFUL", ("forgetful.*",), max_bytes=4096, max_message_bytes=2048)
KEEPING = StreamSpec("KEEPING", ("keeping.*",), max_bytes=4096, discard_new=True)
BRIEF = BucketSpec("brief", ttl_s=1.0)
virtual = virtual_time.event_loop_policy


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 60)


async def take(entries: AsyncIterator[Entry], number: int) -> list[tuple[str, bytes | None]]:
    found = [await soon(anext(entries)) for _ in range(number)]
    return [(entry.key, entry.data) for entry in found]


async def claim(consumer: Consumer) -> Delivery:
    """The next message, whenever it comes."""
    (delivery,) = await soon(consumer.fetch(1, 60))
    return delivery


def contents(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.stored.data for delivery in deliveries]


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
