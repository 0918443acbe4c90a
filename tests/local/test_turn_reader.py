"""The recorder's turns: read once for many episodes, and again for an episode whose turns are not there."""

from collections.abc import AsyncIterator
from typing import cast

import pytest

from marlaas.local import recorder
from marlaas.local.folder import OutFolder
from marlaas.local.recorder import TurnReader
from marlaas.local.records import RecordFile
from marlaas_api import subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import Bus, Stored
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.messages import Episode, Meter, StopReason, Turn
from marlaas_api.names import JobRef, Split, episode_id, train_group
from marlaas_api.wire import encode, pack_ids, pack_logprobs

REF = JobRef("team-a", "job", "u1")


class CountingBus:
    """A bus that counts the reads of streams."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.read: list[str] = []

    async def replay(self, stream: str, subject: str, start: int = 1) -> list[Stored]:
        self.read.append(subject)
        return await self._bus.replay(stream, subject, start)

    async def pages(self, stream: str, subject: str, start: int = 1) -> AsyncIterator[list[Stored]]:
        yield await self.replay(stream, subject, start)


def _named(member: int, number: int, num_turns: int = 2) -> tuple[Episode, Turn]:
    group = train_group(REF, 0)
    name = episode_id(group, member, 1)
    body = {"namespace": "team-a", "job": "job", "uid": "u1", "group": group, "member": member, "episode": name}
    turn = Turn(
        **body,
        agent="policy",
        turn=number,
        parent=None,
        version=0,
        adapter_sha256="",
        opens_segment=True,
        append="",
        prompt_ids=pack_ids([1]),
        output_ids=pack_ids([2]),
        logprobs=pack_logprobs([-1.0]),
        text=f"{member}.{number}",
        stop_reason=StopReason.STOP,
        temperature=1.0,
        meter=Meter(prompt_tokens=1, output_tokens=1),
        replica="rollout-0",
        at=1.0,
    )
    return Episode(**body, split=Split.TRAIN, index=0, rewards={"policy": 1.0}, num_turns=num_turns), turn


async def _publish(bus: Bus, member: int, *numbers: int) -> Episode:
    for number in numbers:
        episode, turn = _named(member, number, len(numbers))
        await bus.publish(subjects.turn("team-a", "job", turn.episode, number), encode(turn))
    return episode


@pytest.fixture
async def bus() -> Bus:
    bus = MemoryServer().connect("test")
    await bus.ensure()
    return bus


async def _texts(reader: TurnReader, episode: Episode) -> list[str]:
    return [turn.text for turn in await reader.of(episode)]


async def test_the_turns_of_many_episodes_are_read_at_once_and_each_only_once(bus: Bus) -> None:
    counting = CountingBus(bus)
    reader = TurnReader(cast("Bus", counting), MemoryBlobs(), REF)
    first, second = await _publish(bus, 0, 0, 1), await _publish(bus, 1, 0, 1)
    await reader.read_new()
    assert (await _texts(reader, first), await _texts(reader, second)) == (["0.0", "0.1"], ["1.0", "1.1"])
    third = await _publish(bus, 2, 0)
    await reader.read_new()
    assert await _texts(reader, third) == ["2.0"]
    assert counting.read == ["turn.team-a.job.*.*"] * 2


async def test_turns_that_are_not_kept_are_read_for_their_episode(bus: Bus) -> None:
    reader = TurnReader(bus, MemoryBlobs(), REF)
    episode = await _publish(bus, 0, 0, 1)
    await reader.read_new()
    assert len(await reader.of(episode)) == 2
    assert await _texts(reader, episode) == ["0.0", "0.1"]  # recorded again: its ack was lost


async def test_turns_without_an_episode_are_dropped_beyond_a_size(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    one = len(encode(_named(0, 0)[1]))
    monkeypatch.setattr(recorder, "MAX_KEPT_BYTES", 2 * one + 10)
    counting = CountingBus(bus)
    reader = TurnReader(cast("Bus", counting), MemoryBlobs(), REF)
    oldest, _, newest = [await _publish(bus, member, 0) for member in range(3)]
    await reader.read_new()
    assert await _texts(reader, newest) == ["2.0"]
    assert len(counting.read) == 1
    assert await _texts(reader, oldest) == ["0.0"]
    assert len(counting.read) == 2


def test_a_file_of_records_is_replaced_only_if_it_changes(tmp_path, document, step) -> None:
    folder, job = OutFolder(tmp_path), document()
    file = RecordFile(job.ref)
    file.write(folder)
    steps, evals = (folder.job(job.ref) / name for name in ("steps.jsonl", "evals.jsonl"))
    before = evals.stat().st_ino
    file.add(step(job, 0))
    file.write(folder)
    assert len(steps.read_bytes().splitlines()) == 1
    assert evals.stat().st_ino == before
    steps.unlink()
    file.write(folder)
    assert len(steps.read_bytes().splitlines()) == 1
