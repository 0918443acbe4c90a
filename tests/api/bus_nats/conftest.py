"""Real servers that a test may kill, hang, fill, or give users to. What every bus promises is in tests/api/bus_contract."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusUnavailable
from marlaas_api.bus_nats import NatsBus, connect
from marlaas_api.bus_nats.dial import Dial
from marlaas_api.bus_nats.link import Link
from marlaas_api.nats_server import EmbeddedNats

T = TypeVar("T")
EPISODES, TASKS = subjects.EPISODES, subjects.TASKS
EPISODE, TASK = subjects.episode("team-a", "job"), subjects.task("team-a", "job")
USERS = """
authorization {
  users = [
    { user: admin, password: secret }
    { user: sandbox, password: secret, permissions: {
        publish: ["task.team-a.>", "$JS.API.STREAM.INFO.*", "$JS.API.CONSUMER.CREATE.TASKS.>"]
        subscribe: ["_INBOX.>", "gen.team-a.>"] } }
    { user: deaf, password: secret, permissions: { publish: ">", subscribe: "_INBOX_deaf.>" } }
  ]
}
"""


async def soon(awaitable: Awaitable[T]) -> T:
    """What ends on any machine that does not hang."""
    return await asyncio.wait_for(awaitable, 60)


async def persist(call: Callable[[], Awaitable[T]]) -> T:
    """As callers do: what is Retryable is tried again."""
    while True:
        try:
            return await call()
        except BusUnavailable:
            continue


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    async with EmbeddedNats(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(server: EmbeddedNats) -> AsyncIterator[Bus]:
    bus = await connect(server.url, name="test")
    await bus.ensure()
    yield bus
    await bus.close()


@pytest.fixture
async def hasty(server: EmbeddedNats, bus: Bus) -> AsyncIterator[Bus]:
    """A client that gives up soon; what it gives up is tried again (`persist`)."""
    link = Link(Dial(server.url, "hasty", answer_s=0.5))
    await link.open(60)
    yield NatsBus(link)
    await link.close()


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A server with users; gives a user's URL."""
    server = EmbeddedNats(tmp_path_factory.mktemp("guarded"), extra_config=USERS)
    asyncio.run(server.start())
    asyncio.run(ensure(f"nats://admin:secret@127.0.0.1:{server.port}"))
    yield lambda user: f"nats://{user}:secret@127.0.0.1:{server.port}"
    asyncio.run(server.stop())


async def ensure(url: str) -> None:
    admin = await connect(url, name="admin")
    await admin.ensure()
    await admin.close()


@pytest.fixture
async def sandbox(guarded: Callable[[str], str]) -> AsyncIterator[Bus]:
    bus = await connect(guarded("sandbox"), name="sandbox-1")
    yield bus
    await bus.close()
