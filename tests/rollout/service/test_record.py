from typing import Any

import pytest
from tests.harness import a_turn

from marlaas_api.blobs import BlobRef, BlobRefused, BlobUnavailable
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory import MemoryBus, MemoryServer
from marlaas_api.messages import Turn
from marlaas_worker.rollout import turn_log
from marlaas_worker.rollout.turn_log import TurnLog


def turn(number: int, text: str = "yes", append: str = "text") -> Turn:
    names = {"namespace": "team", "job": "job", "uid": "u", "group": "u-t0", "episode": "u-t0-0-1"}
    return a_turn(number, number - 1 if number else None, **names, text=text, append=append)


async def ready_bus() -> MemoryBus:
    bus = MemoryServer().connect("test")
    await bus.ensure()
    return bus


async def test_the_first_record_of_a_turn_is_the_turn():
    log = TurnLog(await ready_bus(), MemoryBlobs())
    assert await log.record(turn(0, "first")) == turn(0, "first")
    assert await log.record(turn(0, "second")) == turn(0, "first")
    assert await log.find("team", "job", "u-t0-0-1", 0) == turn(0, "first")
    assert await log.find("team", "job", "u-t0-0-1", 1) is None


async def test_an_episode_is_read_at_once():
    log = TurnLog(await ready_bus(), MemoryBlobs())
    for number in range(3):
        await log.record(turn(number))
    assert await log.episode("team", "job", "u-t0-0-1") == {number: turn(number) for number in range(3)}


async def test_a_turn_above_the_payload_limit_goes_through_the_blob_store():
    bus, blobs = await ready_bus(), MemoryBlobs()
    log = TurnLog(bus, blobs)
    large = turn(0, append="x" * bus.max_payload_bytes)
    await log.record(large)
    assert [name.split("/")[:4] for name in blobs.contents] == [["team", "job", "u", "claims"]]
    assert await log.find("team", "job", "u-t0-0-1", 0) == large


async def test_a_turn_whose_record_was_not_confirmed_counts_as_recorded_here(monkeypatch):
    monkeypatch.setattr(turn_log, "_FIRST_WAIT_S", 0.001)
    bus = await ready_bus()
    publish, own, confirmed = bus.publish, turn(0, "own"), TurnLog(await ready_bus(), MemoryBlobs())

    async def lose_the_answer(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(bus, "publish", publish)
        await publish(*arguments, **options)
        raise BusUnavailable("no answer")

    monkeypatch.setattr(bus, "publish", lose_the_answer)
    log = TurnLog(bus, MemoryBlobs())
    assert await log.record(own) is own
    assert await confirmed.record(own) is own
    assert log.job_bytes == confirmed.job_bytes
    before = log.job_bytes.copy()
    assert await log.record(turn(0, "second")) == own
    assert log.job_bytes == before, "another one's record is not counted"


class AwayTwice(MemoryBlobs):
    """A store that comes back at the third attempt."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.attempts = error, 0

    async def put(self, folder: str, filename: str, data: bytes) -> BlobRef:
        self.attempts += 1
        if self.attempts < 3:
            raise self.error
        return await super().put(folder, filename, data)


@pytest.mark.parametrize("error", [BlobUnavailable("away"), BlobRefused("its token has expired")])
async def test_recording_waits_for_a_store_that_is_away(monkeypatch, error):
    monkeypatch.setattr(turn_log, "_FIRST_WAIT_S", 0.001)
    bus, blobs = await ready_bus(), AwayTwice(error)
    large = turn(0, append="x" * bus.max_payload_bytes)
    assert await TurnLog(bus, blobs).record(large) == large
    assert blobs.attempts == 3
