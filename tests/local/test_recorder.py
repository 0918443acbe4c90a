"""The recorder of episodes, and its turns: read once for many episodes, and again for an episode whose turns are not there."""

import asyncio

import pytest
from tests.harness import a_turn, an_episode, job_document

from marlaas.episodes.files import read
from marlaas.local import recorder
from marlaas.local.folder import hold
from marlaas.local.recorder import Recorder, TurnReader, consumer_name
from marlaas_api import subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_memory.consumers import MemoryConsumer
from marlaas_api.messages import Episode
from marlaas_api.wire import encode, pack

JOB = job_document()
EPISODES = subjects.episode(JOB.namespace, JOB.job)


@pytest.fixture(autouse=True)
def _nothing_comes_late(monkeypatch):
    monkeypatch.setattr(recorder, "LAST_S", 0.0)


@pytest.fixture
def folder(tmp_path):
    with hold(tmp_path) as held:
        yield held


def played(member, number=0, num_turns=1, job=JOB):
    episode = an_episode(job, member=member, num_turns=num_turns, rewards={"policy": 1.0})
    names = {"uid": job.uid, "group": episode.group, "member": member, "episode": episode.episode}
    return episode, a_turn(number, version=2, text=f"{member}.{number}", at=50.0, **names)


async def publish_turns(bus, member, *numbers: int, job=JOB):
    for number in numbers:
        episode, turn = played(member, number, len(numbers), job)
        await bus.publish(subjects.turn(job.namespace, job.job, episode.episode, number), encode(turn))
    return episode


async def publish(bus, *members: int, job=JOB):
    for member in members:
        episode = await publish_turns(bus, member, 0, job=job)
        await bus.publish(subjects.episode(job.namespace, job.job), encode(episode))


async def recorded(folder, bus, *, at_once=False, blobs=None):
    made = Recorder(folder, bus, blobs or MemoryBlobs(), (JOB,))
    made.stop(at_once=at_once)
    await made.run()
    return made


def members(folder, job=JOB):
    return [one.member for one in read(folder.job(job.ref))]


async def test_episodes_are_written_once_with_their_turns_although_an_ack_is_lost(folder, bus):
    await publish(bus, 0, 1)
    await recorded(folder, bus)
    kept = [(one.member, one.turns[0].text, one.versions) for one in read(folder.job(JOB.ref))]
    assert kept == [(0, "0.0", {"policy": 2}), (1, "1.0", {"policy": 2})]
    await bus.delete_consumer(subjects.EPISODES, consumer_name(JOB.ref))  # as if it was killed before its ack
    await publish(bus, 2)
    await recorded(folder, bus)
    file = folder.job(JOB.ref) / "episodes.jsonl"
    assert len(file.read_bytes().splitlines()) == 3
    file.unlink()
    await publish(bus, 3)
    await recorded(folder, bus)
    assert members(folder) == [3], "those that were acked are not read again"


async def test_an_episode_too_large_for_the_bus_is_read_from_its_claim(folder, bus):
    blobs = MemoryBlobs()
    await bus.publish(EPISODES, await pack(await publish_turns(bus, 0, 0), blobs, 1))
    await recorded(folder, bus, blobs=blobs)
    assert members(folder) == [0]


async def test_episodes_of_an_earlier_job_and_those_that_cannot_be_read_are_skipped(folder, bus):
    await publish(bus, 0, job=job_document(uid="earlier"))
    await bus.publish(EPISODES, b"nonsense")
    await publish(bus, 1)
    await recorded(folder, bus)
    assert members(folder) == [1]


async def test_a_job_that_is_over_leaves_no_consumer(folder, bus, server):
    made = await recorded(folder, bus)
    for server.available in (True, True, False):
        await made.forget([JOB.ref])
        assert server.streams[subjects.EPISODES].consumers == {}


async def test_nothing_is_asked_of_the_bus_when_nothing_is_to_be_kept(folder, bus):
    await publish(bus, 0)
    await Recorder(folder, bus, MemoryBlobs(), [JOB], max_bytes=0).run()
    assert not folder.job(JOB.ref).exists()


async def test_jobs_that_come_later_are_recorded_and_those_that_are_gone_no_longer(folder, bus, monkeypatch):
    monkeypatch.setattr(recorder, "GATHER_S", 0.0)
    second = job_document("second")
    reader = Recorder(folder, bus, MemoryBlobs(), [JOB])
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reader.run())
        await publish(bus, 0)
        await until(lambda: members(folder) == [0])
        reader.replace([second])
        await publish(bus, 1, job=second)
        await until(lambda: members(folder, second) == [1])
        await publish(bus, 2)
        reader.stop()
    assert members(folder) == [0]


async def until(wanted):
    async with asyncio.timeout(60.0):
        while not wanted():  # noqa: ASYNC110 - a file tells nobody of a change
            await asyncio.sleep(0.01)


async def test_episodes_that_a_killed_recorder_had_claimed_are_read_before_the_end(folder):
    now = [0.0]
    server = MemoryServer(lambda: now[0])
    bus = server.connect("test")
    await bus.ensure()
    await publish(bus, 0, 1)
    killed = await bus.consumer(subjects.EPISODES, consumer_name(JOB.ref), EPISODES)
    assert len(await killed.fetch(64, 1.0)) == 2
    now[0] += 60.0
    await (await recorded(folder, bus)).forget([JOB.ref])
    assert members(folder) == [0, 1]
    assert server.stream(subjects.EPISODES).consumers == {}


@pytest.mark.parametrize("at_once", [False, True])
async def test_the_consumer_stays_if_episodes_could_not_be_read(folder, bus, server, monkeypatch, caplog, at_once):
    monkeypatch.setattr(recorder, "LAST_S", 1e6 * at_once)

    async def unavailable(*_: object):
        raise BusUnavailable("not now")

    await publish(bus, 0)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryConsumer, "fetch", unavailable)
        await (await recorded(folder, bus, at_once=at_once)).forget([JOB.ref])
    assert "some of its last episodes were not read" in caplog.text
    await (await recorded(folder, bus)).forget([JOB.ref])
    assert members(folder) == [0]
    assert server.stream(subjects.EPISODES).consumers == {}


class CountingBus:
    def __init__(self, bus):
        self._bus = bus
        self.read: list[str] = []

    async def replay(self, stream, subject, start=1):
        self.read.append(subject)
        return await self._bus.replay(stream, subject, start)

    async def pages(self, stream, subject, start=1):
        yield await self.replay(stream, subject, start)


@pytest.fixture
def reader(bus):
    return TurnReader(CountingBus(bus), MemoryBlobs(), JOB.ref)


async def texts(reader, *episodes: Episode):
    return [[turn.text for turn in await reader.of(episode)] for episode in episodes]


async def test_the_turns_of_many_episodes_are_read_at_once_and_each_only_once(bus, reader):
    first, second = await publish_turns(bus, 0, 0, 1), await publish_turns(bus, 1, 0, 1)
    await reader.read_new()
    assert await texts(reader, first, second) == [["0.0", "0.1"], ["1.0", "1.1"]]
    third = await publish_turns(bus, 2, 0)
    await reader.read_new()
    assert await texts(reader, third) == [["2.0"]]
    assert reader.bus.read == [f"turn.{JOB.ref.key}.*.*"] * 2


async def test_turns_without_an_episode_are_dropped_beyond_a_size(bus, reader, monkeypatch):
    monkeypatch.setattr(recorder, "MAX_KEPT_BYTES", 2 * len(encode(played(0)[1])) + 10)
    oldest, _, newest = [await publish_turns(bus, member, 0) for member in range(3)]
    await reader.read_new()
    assert await texts(reader, newest) == [["2.0"]]
    assert len(reader.bus.read) == 1
    assert await texts(reader, oldest) == [["0.0"]]
    assert len(reader.bus.read) == 2
