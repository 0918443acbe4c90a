"""A nats-server with users and two tenants' jobs on it, and the platform's own connections."""

import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.api.attacks import JOBS, STORED, consumer

from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.bus_nats import NatsBus, connect
from marlaas_api.bus_users import BusKeys, BusUser, OrchestratorUser, SandboxUser, mint, server_config
from marlaas_api.nats_server import EmbeddedNats


@dataclass
class BusHarness:
    """A server with jobs on it, its platform's connections, and what they have heard."""

    server: EmbeddedNats
    keys: BusKeys
    folder: Path
    owner: NatsBus
    heard: Counter[str] = field(default_factory=Counter)

    def creds(self, user: BusUser) -> Path:
        path = self.folder / f"{user.identity}.creds"
        path.write_text(mint(self.keys, user, time.time()))
        return path

    async def connect(self, user: BusUser) -> NatsBus:
        return await connect(self.server.url, name=user.identity, creds=self.creds(user))

    async def state(self) -> dict[str, Any]:
        """What there is on the server: every stream's messages by subject, its configuration and its consumers."""
        admin = self.owner._jetstream
        found: dict[str, Any] = {}
        for stream in STORED:
            info = await admin.api(f"STREAM.INFO.{stream}", "look", {"subjects_filter": ">"})
            state, names = info["state"], ("messages", "last_seq", "subjects", "consumer_count")
            found[stream] = (info["config"], *(state.get(name) for name in names))
        for user in JOBS:
            info = await admin.api(f"CONSUMER.INFO.{subjects.TASKS}.{consumer(user)}", "look")
            position = info["delivered"]["stream_seq"], info["num_ack_pending"], info["ack_floor"]["stream_seq"]
            found[consumer(user)] = (info["config"], *position)
        return found


async def settle_down(owner: Bus, user: SandboxUser) -> None:
    """What an admitted job has on the bus."""
    ns, job = user.namespace, user.job
    await owner.consumer(subjects.TASKS, consumer(user), subjects.task(ns, job), ack_wait_s=60)
    await owner.consumer(subjects.EPISODES, consumer(user, "orchestrator"), subjects.episode(ns, job))
    for number in range(3):
        await owner.publish(subjects.task(ns, job), b"task %d" % number)
    for bucket in (subjects.JOBS, subjects.PROGRESS):
        await (await owner.bucket(bucket)).put(subjects.job_key(ns, job), f"{bucket} of {job}".encode())
    await (await owner.bucket(subjects.POLICY)).put(subjects.policy_key(ns, job, "policy"), b"policy")


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
