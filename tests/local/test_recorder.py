import asyncio

import pytest
from tests.local.conftest import identity

from marlaas.episodes.files import read
from marlaas.local import recorder
from marlaas.local.folder import hold
from marlaas.local.recorder import Recorder, consumer_name
from marlaas_api import subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import Bus, BusUnavailable
from marlaas_api.bus_memory.consumers import MemoryConsumer
from marlaas_api.messages import ChatMessage, Episode, JobDocument, Meter, StopReason, Turn
from marlaas_api.names import Split, episode_id, train_group
from marlaas_api.wire import encode, pack, pack_ids, pack_logprobs


def _episode(job: JobDocument, member: int) -> tuple[Episode, Turn]:
    group = train_group(job.ref, 4)
    body = {**identity(job), "group": group, "member": member, "episode": episode_id(group, member, 1)}
    append = (ChatMessage(role="user", content="hello"),)
    place = {"agent": "policy", "turn": 0, "parent": None, "version": 2, "adapter_sha256": "", "opens_segment": True}
    ids = {"prompt_ids": pack_ids([1]), "output_ids": pack_ids([5, 6]), "logprobs": pack_logprobs([-1.0, -2.0])}
    reply = {"text": f"reply {member}", "stop_reason": StopReason.STOP, "temperature": 1.0, "replica": "rollout-0"}
    turn = Turn(**body, **place, **ids, **reply, append=append, meter=Meter(prompt_tokens=1, output_tokens=2), at=50.0)
    return Episode(**body, split=Split.TRAIN, index=4, rewards={"policy": 1.0}, num_turns=1), turn


async def _publish_episodes(bus: Bus, job: JobDocument, *members: int, payload=encode) -> None:
    for member in members:
        episode, turn = _episode(job, member)
        name = subjects.turn(job.namespace, job.job, episode.episode, 0)
        await bus.publish(name, encode(turn))
        data = payload(episode)
        await bus.publish(subjects.episode(job.namespace, job.job), await data if asyncio.iscoroutine(data) else data)


async def _recorded(folder, bus, *jobs, blobs=None, at_once=False) -> Recorder:
    """Record all published episodes."""
    made = Recorder(folder, bus, blobs or MemoryBlobs(), jobs)
    made.stop(at_once=at_once)
    await made.run()
    return made


async def test_episodes_are_written_with_their_turns_as_they_end(bus, tmp_path, document):
    job = document()
    with hold(tmp_path) as folder:
        await _publish_episodes(bus, job, 0, 1)
        await _recorded(folder, bus, job)
        kept = list(read(folder.job(job.ref)))
    assert [one.member for one in kept] == [0, 1]
    assert [one.turns[0].text for one in kept] == ["reply 0", "reply 1"]
    assert kept[0].versions == {"policy": 2}


async def test_a_runner_that_was_killed_before_its_ack_writes_nothing_twice(server, bus, tmp_path, document):
    job = document()
    name = subjects.episode(job.namespace, job.job)
    with hold(tmp_path) as folder:
        await _publish_episodes(bus, job, 0, 1)
        await _recorded(folder, bus, job)
        await bus.delete_consumer(subjects.EPISODES, consumer_name(job.ref))
        consumer = await bus.consumer(subjects.EPISODES, consumer_name(job.ref), name)
        assert consumer is not None
        await _publish_episodes(bus, job, 2)
        await _recorded(folder, bus, job)
        lines = (folder.job(job.ref) / "episodes.jsonl").read_bytes().splitlines()
    assert len(lines) == 3


async def test_an_acked_episode_is_not_read_again(bus, tmp_path, document):
    job = document()
    with hold(tmp_path) as folder:
        await _publish_episodes(bus, job, 0)
        await _recorded(folder, bus, job)
        (folder.job(job.ref) / "episodes.jsonl").unlink()
        await _publish_episodes(bus, job, 1)
        await _recorded(folder, bus, job)
        assert [one.member for one in read(folder.job(job.ref))] == [1]


async def test_an_episode_too_large_for_the_bus_is_read_from_its_claim(bus, blobs, tmp_path, document):
    job = document()
    with hold(tmp_path) as folder:
        await _publish_episodes(bus, job, 0, payload=lambda episode: pack(episode, blobs, 1))
        await _recorded(folder, bus, job, blobs=blobs)
        assert [one.member for one in read(folder.job(job.ref))] == [0]


async def test_episodes_of_an_earlier_job_and_what_nobody_can_read_are_passed_over(bus, tmp_path, document):
    job = document()
    with hold(tmp_path) as folder:
        await _publish_episodes(bus, document(uid="earlier"), 0)
        await bus.publish(subjects.episode(job.namespace, job.job), b"nonsense")
        await _publish_episodes(bus, job, 1)
        await _recorded(folder, bus, job)
        assert [one.member for one in read(folder.job(job.ref))] == [1]


async def test_a_job_that_is_over_leaves_no_consumer(server, bus, tmp_path, document):
    job = document()
    with hold(tmp_path) as folder:
        recorder = await _recorded(folder, bus, job)
        await recorder.forget([job.ref])
        await recorder.forget([job.ref])
        server.available = False
        await recorder.forget([job.ref])
        server.available = True


async def test_nothing_is_asked_of_the_bus_when_nothing_is_to_be_kept(bus, tmp_path, document):
    job = document()
    with hold(tmp_path) as folder:
        await _publish_episodes(bus, job, 0)
        await Recorder(folder, bus, MemoryBlobs(), [job], max_bytes=0).run()
        assert not folder.job(job.ref).exists()


async def test_jobs_that_come_later_are_recorded_and_those_that_are_gone_no_longer(server, bus, tmp_path, document):
    first, second = document("first"), document("second")
    with hold(tmp_path) as folder:
        reader = Recorder(folder, bus, MemoryBlobs(), [first])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reader.run())
            await _publish_episodes(bus, first, 0)
            await _until_recorded(bus, first)
            reader.replace([second])
            await _publish_episodes(bus, second, 1)
            await _until_recorded(bus, second)
            await _publish_episodes(bus, first, 2)
            reader.stop()
        assert [one.member for one in read(folder.job(second.ref))] == [1]
        assert [one.member for one in read(folder.job(first.ref))] == [0]


async def test_episodes_that_a_killed_recorder_had_claimed_are_read_before_the_end(server, bus, tmp_path, document):
    job = document()
    name = subjects.episode(job.namespace, job.job)
    with hold(tmp_path) as folder:
        await _publish_episodes(bus, job, 0, 1)
        killed = await bus.consumer(subjects.EPISODES, consumer_name(job.ref), name, ack_wait_s=1.0)
        assert len(await killed.fetch(64, 1.0)) == 2
        await (await _recorded(folder, bus, job)).forget([job.ref])
        assert [one.member for one in read(folder.job(job.ref))] == [0, 1]
        assert server.stream(subjects.EPISODES).consumers == {}


@pytest.mark.parametrize("at_once", [False, True])
async def test_the_consumer_stays_if_episodes_could_not_be_read(
    server, bus, tmp_path, document, monkeypatch, caplog, at_once
):
    monkeypatch.setattr(recorder, "LAST_S", 1e6 if at_once else 0.5)
    job, fetch = document(), MemoryConsumer.fetch

    async def unavailable(*_: object) -> object:
        raise BusUnavailable("not now")

    with hold(tmp_path) as folder:
        await _publish_episodes(bus, job, 0)
        monkeypatch.setattr(MemoryConsumer, "fetch", unavailable)
        await (await _recorded(folder, bus, job, at_once=at_once)).forget([job.ref])
        assert "some of its last episodes were not read" in caplog.text
        monkeypatch.setattr(MemoryConsumer, "fetch", fetch)
        await (await _recorded(folder, bus, job)).forget([job.ref])
        assert [one.member for one in read(folder.job(job.ref))] == [0]
        assert server.stream(subjects.EPISODES).consumers == {}


async def _until_recorded(bus: Bus, job: JobDocument) -> None:
    async with asyncio.timeout(30.0):
        while True:
            position = await bus.position(subjects.EPISODES, consumer_name(job.ref))
            if position is not None and position.num_behind == 0:
                return
            await asyncio.sleep(0)
