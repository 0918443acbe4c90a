"""Records of turns and conversations: in memory, and on a real nats-server when the stream is full and when the server is killed."""

import asyncio
from dataclasses import replace

import pytest
from tests.harness import a_turn, job_document
from tests.rollout.service.harness import Job, RolloutHarness
from tests.rollout.service.scripted import ScriptedEngine

from marlaas_api import subjects
from marlaas_api.blobs import BlobRefused, BlobUnavailable
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_nats import connect
from marlaas_api.messages import ChatMessage
from marlaas_api.names import JobRef
from marlaas_api.nats_server import EmbeddedNats
from marlaas_worker.rollout import turn_log
from marlaas_worker.rollout.conversation import NO_IDS, Conversation
from marlaas_worker.rollout.served_jobs import ServedJobs
from marlaas_worker.rollout.turn_log import TurnLog, add_history, knows_parent


def turn(number, text="yes", append="text"):
    names = {"namespace": "team", "job": "job", "uid": "u", "group": "u-t0", "episode": "u-t0-0-1"}
    return a_turn(number, number - 1 if number else None, **names, text=text, append=append)


def kept(job="job", uid="u"):
    """The `ServedJob` of a job, empty."""
    return ServedJobs().of(JobRef("team", job, uid))


async def ready_bus():
    bus = MemoryServer().connect("test")
    await bus.ensure()
    return bus


async def test_the_first_record_of_a_turn_is_the_turn_and_an_episode_is_read_at_once():
    log = TurnLog(await ready_bus(), MemoryBlobs())
    assert await log.record(kept(), turn(0, "first")) == turn(0, "first")
    assert await log.record(kept(), turn(0, "second")) == turn(0, "first")
    assert await log.find("team", "job", "u-t0-0-1", 0) == turn(0, "first")
    assert await log.find("team", "job", "u-t0-0-1", 1) is None
    await log.record(kept(), turn(1))
    assert await log.episode("team", "job", "u-t0-0-1") == {0: turn(0, "first"), 1: turn(1)}


@pytest.mark.parametrize("error", [BlobUnavailable("away"), BlobRefused("its token has expired")])
async def test_a_turn_above_the_payload_limit_goes_through_the_blob_store_once_it_is_there(monkeypatch, error):
    monkeypatch.setattr(turn_log, "_FIRST_WAIT_S", 0.001)
    bus, blobs, failures = await ready_bus(), MemoryBlobs(), [error] * 2
    put = blobs.put

    async def away_twice(*arguments):
        if failures:
            raise failures.pop()
        return await put(*arguments)

    monkeypatch.setattr(blobs, "put", away_twice)
    log, large = TurnLog(bus, blobs), turn(0, append="x" * bus.max_payload_bytes)
    assert await log.record(kept(), large) == large
    assert [name.split("/")[:4] for name in blobs.contents] == [["team", "job", "u", "claims"]]
    assert await log.find("team", "job", "u-t0-0-1", 0) == large


def test_conversations_are_kept_within_a_bound_a_linear_one_in_one_place_until_their_job_is_gone():
    """Prompts that fit no context count by their text: they have no ids, and eight million characters each."""

    def keep(member, number, text, full=False):
        request = job.request(member=member, turn=number)
        assert number == 0 or full or knows_parent(served, request)
        said = (ChatMessage(role="user", content=text),)
        add_history(served, request, Conversation(said, "", text, NO_IDS, None, full=full))

    job, jobs = Job(job_document()), ServedJobs()
    served, bound = jobs.of(job.document.ref), jobs.bounds.histories
    bound.max_bytes = 6 << 20
    for number in range(8):
        for member in range(2048):  # open episodes of eight turns each are all found again
            keep(member, number, "x" * 100 * (number + 1))
    assert len(served.histories) == 2048
    served.clear_caches()
    assert (len(served.histories), bound.num_bytes) == (0, 0)
    bound.max_bytes = 10_000
    for member in range(100):
        keep(member, 0, "x" * 1000, full=True)
    assert [one for one in range(100) if knows_parent(served, job.request(member=one, turn=1))] == [97, 98, 99]


async def test_a_turn_whose_record_was_not_confirmed_counts_as_recorded_here(monkeypatch):
    monkeypatch.setattr(turn_log, "_FIRST_WAIT_S", 0.001)
    bus = await ready_bus()
    publish, own, confirmed = bus.publish, turn(0, "own"), TurnLog(await ready_bus(), MemoryBlobs())

    async def lose_the_answer(*arguments, **options):
        monkeypatch.setattr(bus, "publish", publish)
        await publish(*arguments, **options)
        raise BusUnavailable("no answer")

    monkeypatch.setattr(bus, "publish", lose_the_answer)
    log = TurnLog(bus, MemoryBlobs())
    job, same = kept(), kept()
    assert await log.record(job, own) is own
    assert await confirmed.record(same, own) is own
    assert job.turn_bytes == same.turn_bytes > 0
    assert await log.record(job, turn(0, "second")) == own
    assert job.turn_bytes == same.turn_bytes, "another one's record is not counted"


(TURNS,) = [spec for spec in subjects.STREAMS if spec.name == subjects.TURNS]
SMALL = replace(TURNS, max_bytes=64_000)
"""It takes six turns."""


def large_turn(job, number):
    return a_turn(number, job=job, uid=f"uid-{job}", group="g", episode="e", prompt_ids=bytes(9000))


@pytest.fixture
async def nats(tmp_path):
    async with EmbeddedNats(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(nats):
    made = await connect(nats.url, name="test")
    yield made
    await made.close()


@pytest.mark.processes
async def test_a_turn_waits_while_the_stream_is_full_of_live_turns_and_none_is_lost(bus):
    await bus.ensure((SMALL,), ())
    log = TurnLog(bus, MemoryBlobs())
    jobs = {name: kept(name, f"uid-{name}") for name in ("slow", "busy")}
    slow = [large_turn("slow", number) for number in range(2)]
    busy = [large_turn("busy", number) for number in range(6)]
    for one in (*slow, *busy[:4]):
        await log.record(jobs[one.job], one)
    waiting = [asyncio.create_task(log.record(jobs["busy"], one)) for one in busy[4:]]
    while log.num_waiting < 2:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)
    assert log.explain() == "the stream TURNS is full"
    assert [await log.find("team-a", "slow", "e", one.turn) for one in slow] == slow
    await bus.purge(subjects.TURNS, subjects.turn("team-a", "busy", "*", "*"))
    assert await asyncio.gather(*waiting) == busy[4:]
    assert (log.num_waiting, log.explain()) == (0, "the stream TURNS has room")
    assert jobs["slow"].turn_bytes > 2 * 9000


@pytest.mark.processes
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
