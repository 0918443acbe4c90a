"""The message server of a run: an embedded one that is kept alive, or one that is there already."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from marlaas.local.folder import OutFolder
from marlaas.local.processes import Warden
from marlaas_api.background import background
from marlaas_api.bus import Bus
from marlaas_api.bus_nats import connect
from marlaas_api.nats_server import EmbeddedNats, ServerFailed

RETRY_S = 1.0
MAX_RETRIES = 5


@dataclass(frozen=True, slots=True)
class MessageServer:
    """Where roles connect, and the runner's own connection."""

    url: str
    bus: Bus


@asynccontextmanager
async def message_server(folder: OutFolder, url: str | None, warden: Warden) -> AsyncIterator[MessageServer]:
    """Connect to the server at `url`, or else to one of our own; streams and buckets are there then.

    Raises:
        ServerFailed: our own server cannot start (port or store taken, disk full), or cannot be kept alive.
        BusUnavailable, BusRefused: the server at `url` does not answer, or refuses.
    """
    if url is not None:
        async with _connected(url) as server:
            yield server
        return
    embedded = EmbeddedNats(folder.nats_store, log_path=folder.logs / "nats.log")
    async with embedded, background(_keep_alive(embedded, warden)), _connected(embedded.url) as server:
        yield server


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[MessageServer]:
    bus = await connect(url, name="marlaas run")
    try:
        await bus.ensure()
        yield MessageServer(url, bus)
    finally:
        await bus.close()


async def _keep_alive(server: EmbeddedNats, warden: Warden) -> None:
    """Restart the server on its port and store whenever it dies. Raises ServerFailed when that fails again and again."""
    while True:
        session = server.pid
        if session is not None:
            warden.add(session)
        await server.wait()
        if session is not None:
            warden.remove(session)
        await _restart(server)


async def _restart(server: EmbeddedNats) -> None:
    for _ in range(MAX_RETRIES):
        try:
            await server.restart()
        except ServerFailed:
            await asyncio.sleep(RETRY_S)
        else:
            return
    await server.restart()
