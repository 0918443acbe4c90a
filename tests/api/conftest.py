"""A nats-server with users, for tests of their permissions."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.api.attacks import JOBS
from tests.api.harness import BusHarness, settle_down

from marlaas_api.bus_nats import connect
from marlaas_api.bus_users import BusKeys, OrchestratorUser, mint, server_config
from marlaas_api.nats_server import EmbeddedNats


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[BusHarness]:
    keys = BusKeys.make()
    async with EmbeddedNats(tmp_path / "nats", extra_config=server_config(keys)) as server:
        path = tmp_path / "owner.creds"
        path.write_text(mint(keys, OrchestratorUser(), time.time()))
        owner = await connect(server.url, name="owner", creds=path)
        harness = BusHarness(server, keys, tmp_path, owner)
        await owner.ensure()
        for user in JOBS:
            await settle_down(owner, user)
        yield harness
        await owner.close()
