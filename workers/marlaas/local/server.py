"""NATS server of a run: an embedded one that is restarted after crashes and admits only this run's roles, or an existing one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from marlaas.local.credentials import CredentialSource, LocalIssuer, OneForAll
from marlaas.local.folder import OutFolder
from marlaas.local.processes import Watchdog
from marlaas_api.background import background
from marlaas_api.bus import Bus
from marlaas_api.bus_nats import connect
from marlaas_api.bus_users import BusKeys, RunnerUser, server_config
from marlaas_api.nats_server import EmbeddedNats, ServerFailed

RETRY_S = 1.0
MAX_RETRIES = 5


@dataclass(frozen=True, slots=True)
class Existing:
    """An existing server. `creds` is the user's credentials file; None if it needs none."""

    url: str
    creds: Path | None = None


@dataclass(frozen=True, slots=True)
class MessageServer:
    """URL and credentials of the roles, and the runner's own connection."""

    url: str
    bus: Bus
    credentials: CredentialSource


@asynccontextmanager
async def message_server(
    folder: OutFolder, existing: Existing | None, watchdog: Watchdog
) -> AsyncIterator[MessageServer]:
    """Connect to the existing server or start an embedded one, and ensure the streams and buckets.

    Raises:
        ServerFailed: the embedded server cannot start (port or store taken, disk full), or cannot be restarted.
        BusUnavailable, BusRefused: the existing server does not answer, or rejects the connection.
    """
    if existing is not None:
        async with _connected(existing.url, OneForAll(existing.creds)) as server:
            yield server
        return
    keys = BusKeys.make()
    embedded = EmbeddedNats(folder.nats_store, log_path=folder.logs / "nats.log", extra_config=server_config(keys))
    with closing(LocalIssuer(keys)) as issuer:
        async with (
            embedded,
            background(_keep_alive(embedded, watchdog)),
            background(issuer.keep_fresh()),
            _connected(embedded.url, issuer) as server,
        ):
            yield server


@asynccontextmanager
async def _connected(url: str, credentials: CredentialSource) -> AsyncIterator[MessageServer]:
    bus = await connect(url, name="marlaas run", creds=credentials.of(RunnerUser()).path)
    try:
        await bus.ensure()
        yield MessageServer(url, bus, credentials)
    finally:
        await bus.close()


async def _keep_alive(server: EmbeddedNats, watchdog: Watchdog) -> None:
    """Restart the server on its port and store whenever it exits. Raises ServerFailed after repeated failures."""
    while True:
        session = server.pid
        if session is not None:
            watchdog.add(session)
        await server.wait()
        if session is not None:
            watchdog.remove(session)
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
