"""What the fake offers beyond the contract: a clock that a test owns, outages on demand, and subject matching."""

import asyncio

import pytest

from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_memory.stream import matches, overlaps
from tests import virtual_time

EPISODES, TASKS = subjects.EPISODES, subjects.TASKS
EPISODE, TASK = subjects.episode("team-a", "job"), subjects.task("team-a", "job")
event_loop_policy = virtual_time.event_loop_policy


@pytest.fixture
async def server() -> MemoryServer:
    server = MemoryServer(virtual_time.now)
    await server.connect("first").ensure()
    return server


async def test_a_message_id_is_forgotten_after_two_minutes_and_logs_by_age(server):
    bus, turn = server.connect("test"), subjects.turn("team-a", "job", "episode", 0)
    first = await bus.publish(EPISODE, b"1", message_id="id")
    await bus.publish(turn, b"1")
    await asyncio.sleep(119)
    assert await bus.publish(EPISODE, b"1", message_id="id") == first
    await asyncio.sleep(1)
    assert await bus.publish(EPISODE, b"1", message_id="id") == first + 1
    await asyncio.sleep(29 * 86400)
    assert await bus.last(subjects.TURNS, turn) is not None
    await asyncio.sleep(86400)
    assert await bus.last(subjects.TURNS, turn) is None


async def test_an_outage_is_a_switch(server):
    bus = server.connect("test")
    bucket = await bus.bucket(subjects.JOBS)
    consumer = await bus.consumer(TASKS, "c", TASK)
    await bus.publish(TASK, b"1")
    server.available = False
    for call in (bus.publish(TASK, b"2"), bucket.put("team-a.job", b"1")):
        with pytest.raises(BusUnavailable):
            await call
    assert await consumer.fetch(1, 0) == []
    server.available = True
    assert len(await consumer.fetch(1, 0)) == 1


async def test_a_watch_begins_again_after_an_outage(server):
    bucket = await server.connect("test").bucket(subjects.JOBS)
    await bucket.put("team-a.gone", b"1")
    await bucket.put("team-a.stays", b"2")
    async with bucket.watch() as entries:
        assert [(await anext(entries)).key for _ in range(2)] == ["team-a.gone", "team-a.stays"]
        waiting = asyncio.ensure_future(anext(entries))
        await asyncio.sleep(0)
        server.available = False
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        server.streams["KV_jobs"].remove(1)
        server.available = True
        told = [await waiting, await anext(entries)]
    assert [(entry.key, entry.data) for entry in told] == [("team-a.gone", None), ("team-a.stays", b"2")]


def test_subjects_match_as_nats_says_and_patterns_overlap_when_some_subject_matches_both():
    for pair in ("a.b a.b", "a.* a.b", "a.*.c a.b.c", "a.> a.b.c", "> a"):
        assert matches(*pair.split()), pair
    for pair in ("a.b a.c", "a.b a.b.c", "a.* a", "a.> a"):
        assert not matches(*pair.split()), pair
    for pair in ("a.b a.b", "a.* a.b", "a.*.c a.b.*", "a.> a.b.c", "a.b a.c", "a.* a.b.c", "a.b.* a.c.*"):
        one, other = pair.split()
        apart = pair in ("a.b a.c", "a.* a.b.c", "a.b.* a.c.*")
        assert overlaps(one, other) is overlaps(other, one) is not apart, pair
