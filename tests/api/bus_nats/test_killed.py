"""A server that is killed and started again."""

import asyncio

import pytest
from tests.api.bus_nats.patience import EPISODE, EPISODES, persist, soon

from marlaas_api import subjects
from marlaas_api.bus import Bus, Request
from marlaas_api.nats_server import EmbeddedNats

pytestmark = pytest.mark.processes


async def test_nothing_acked_is_lost_when_the_server_is_killed_while_many_publish(server, bus) -> None:
    milestones = {200: asyncio.Event(), 800: asyncio.Event()}
    done: list[int] = []

    async def publish(number: int) -> int:
        done.append(await persist(lambda: bus.publish(EPISODE, b"%d" % number, message_id=f"id-{number}")))
        if len(done) in milestones:
            milestones[len(done)].set()
        return done[-1]

    async def publish_all(start: int) -> list[int]:
        return [await publish(number) for number in range(start, 2000, 8)]

    publishers = [asyncio.create_task(publish_all(start)) for start in range(8)]
    for milestone in milestones.values():
        await soon(milestone.wait())
        await server.restart()
    sequences = [sequence for task in publishers for sequence in await soon(task)]
    found = await bus.replay(EPISODES, EPISODE)
    assert {stored.data for stored in found} == {b"%d" % number for number in range(2000)}
    assert sorted(sequences) == [stored.sequence for stored in found]


async def test_settling_what_a_killed_server_forgot_says_so_at_once(server: EmbeddedNats, bus: Bus) -> None:
    await bus.publish(EPISODE, b"1")
    consumer = await bus.consumer(EPISODES, "team-a_job", EPISODE, ack_wait_s=1.0)
    (delivery,) = await soon(consumer.fetch(1, 60))
    await server.restart()
    refused = await asyncio.gather(delivery.ack(), return_exceptions=True)
    if refused != [None]:
        assert "delivers it again" in str(refused[0])
        (again,) = await soon(consumer.fetch(1, 60))
        await again.ack()
    assert await soon(consumer.fetch(1, 0.05)) == []


async def test_a_watch_hears_of_a_key_that_went_while_it_was_away(server: EmbeddedNats, bus: Bus) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    await bucket.put("team-a.gone", b"1")
    await bucket.put("team-a.stays", b"2")
    async with bucket.watch("team-a.") as entries:
        assert {(await soon(anext(entries))).key for _ in range(2)} == {"team-a.gone", "team-a.stays"}
        await server.restart()
        await persist(lambda: bucket.delete("team-a.gone"))
        told = [await soon(anext(entries)) for _ in range(2)]
        while {(entry.key, entry.data) for entry in told[-2:]} != {("team-a.gone", None), ("team-a.stays", b"2")}:
            told.append(await soon(anext(entries)))


async def test_a_graceful_stop_is_an_outage_like_any_other_after_which_listeners_hear_again(server, bus) -> None:
    heard: asyncio.Queue[Request] = asyncio.Queue()
    async with bus.listen("gen.team-a.>", heard.put, queue="rollout"):
        await server.stop()
        waiting = asyncio.create_task(persist(lambda: bus.publish(EPISODE, b"1", message_id="1")))
        await server.start()
        assert await soon(waiting) == 1
        await persist(lambda: bus.send("gen.team-a.job.agent", b"1"))
        assert (await soon(heard.get())).data == b"1"
