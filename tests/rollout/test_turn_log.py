"""Turns on a real nats-server: when the stream is full, and when the server is killed. None is lost."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.harness import a_turn
from tests.rollout.service.harness import RolloutHarness
from tests.rollout.service.scripted import ScriptedEngine

from marlaas_api import subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import StreamFull
from marlaas_api.bus_nats import NatsBus, connect
from marlaas_api.messages import Turn
from marlaas_api.nats_server import EmbeddedNats
from marlaas_worker.rollout.turn_log import TurnLog

pytestmark = pytest.mark.processes
(TURNS,) = [spec for spec in subjects.STREAMS if spec.name == subjects.TURNS]
SMALL = replace(TURNS, max_bytes=64_000)
"""It takes six turns."""


def turn(job: str, number: int) -> Turn:
    return a_turn(number, job=job, uid=f"uid-{job}", group="g", episode="e", prompt_ids=bytes(9000))


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    async with EmbeddedNats(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(nats: EmbeddedNats) -> AsyncIterator[NatsBus]:
    made = await connect(nats.url, name="test")
    yield made
    await made.close()


async def test_a_turn_waits_while_the_stream_is_full_of_live_turns_and_none_is_lost(bus):
    await bus.ensure((SMALL,), ())
    log = TurnLog(bus, MemoryBlobs())
    slow, busy = [turn("slow", number) for number in range(2)], [turn("busy", number) for number in range(6)]
    for one in (*slow, *busy[:4]):
        await log.record(one)
    waiting = [asyncio.create_task(log.record(one)) for one in busy[4:]]
    while log.num_waiting < 2:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)
    assert log.explain() == "the stream TURNS is full"
    assert [await log.find("team-a", "slow", "e", one.turn) for one in slow] == slow
    await bus.purge(subjects.TURNS, subjects.turn("team-a", "busy", "*", "*"))
    assert await asyncio.gather(*waiting) == busy[4:]
    assert (log.num_waiting, log.explain()) == (0, "the stream TURNS has room")
    assert log.job_bytes["uid-slow"] > 2 * 9000


async def test_a_stream_of_an_earlier_release_is_changed_where_it_is_and_keeps_what_it_holds(bus):
    earlier = replace(SMALL, name="OLD", subjects=("old.>",), max_age_s=7 * 86400.0, discard_new=False)
    await bus.ensure((earlier,), ())
    await bus.publish("old.a", b"kept")
    await bus.ensure((replace(earlier, max_age_s=30 * 86400.0, max_bytes=32_000, discard_new=True),), ())
    assert [one.data for one in await bus.replay("OLD", "old.>")] == [b"kept"]
    assert (await bus.state("OLD")).max_bytes == 64_000, "the larger bound, which somebody may have set, stays"
    for _ in range(6):
        await bus.publish("old.b", bytes(9000))
    with pytest.raises(StreamFull):
        await bus.publish("old.b", bytes(12_000))


async def test_a_killed_server_loses_no_turn_and_costs_no_second_generation(nats, bus, tmp_path):
    harness, engine = RolloutHarness(tmp_path, dial=lambda name: connect(nats.url, name=name)), ScriptedEngine()
    harness.bus = bus
    await bus.ensure()
    _, job = await harness.serving(engine)
    await harness.verified("rollout-0", job.adapter(0))  # it subscribes before it loads anything
    async with harness.asking(job.request()):
        await engine.called.wait()
        await nats.kill()
        engine.open.set()
        await nats.restart()
    await harness.result(job.request())
    assert (await harness.turn(job.request())).text == "yes"
    assert len(engine.calls) == 1
    await harness.close()
