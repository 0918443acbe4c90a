"""Deleting a job on a real nats-server with a folder of blobs."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.orchestrator.harness import OrchestratorHarness
from tests.orchestrator.remains import TEAM, all_there_is, deleted, doomed, fill, neighbours

from marlaas_api import subjects
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus_nats import connect
from marlaas_api.nats_server import EmbeddedNats

pytestmark = pytest.mark.processes


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The server runs in real time."""
    return asyncio.DefaultEventLoopPolicy()


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[OrchestratorHarness]:
    async with EmbeddedNats(tmp_path / "nats") as server:
        blobs = open_blobs(tmp_path / "blobs")
        made = OrchestratorHarness(tmp_path, dial=lambda name: connect(server.url, name=name), blobs=blobs)
        made.bus = await made.connect("test")
        await made.bus.ensure()
        yield made
        await made.bus.close()


async def test_everything_of_a_deleted_job_is_gone_and_its_neighbours_are_untouched(harness):
    for other in neighbours():
        await fill(harness, other)
    before = await all_there_is(harness)
    team = doomed(agents=TEAM)
    await fill(harness, team)
    assert await deleted(harness, team) == before
    link = harness.bus._jetstream
    for stream in (subjects.EPISODES, subjects.TASKS, subjects.GROUPS):
        names = (await link.api(f"CONSUMER.NAMES.{stream}", "list consumers"))["consumers"]
        assert not [name for name in names if name.startswith("team-a_sums_")]
        assert len(names) == len(neighbours())
    answer = await link.api("STREAM.MSG.GET.KV_jobs", "read a marker", {"last_by_subj": "$KV.jobs.team-a.sums"})
    assert b"Nats-TTL: 1h" in base64.b64decode(answer["message"]["hdrs"]), "a removed key leaves no trace for ever"
