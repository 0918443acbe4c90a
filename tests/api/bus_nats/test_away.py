"""A server that is away, hangs, comes late or is full."""

import asyncio
import os
import resource
import signal
from pathlib import Path

import pytest
from tests.api.bus_nats.conftest import EPISODE, EPISODES, TASK, TASKS, persist, soon

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusRefused, BusUnavailable, Request
from marlaas_api.bus_nats import connect
from marlaas_api.nats_server import EmbeddedNats

pytestmark = pytest.mark.processes


async def test_without_a_server_calls_give_up_and_what_was_given_up_never_happens(server, hasty) -> None:
    bucket = await persist(lambda: hasty.bucket(subjects.PROGRESS))
    consumer = await persist(lambda: hasty.consumer(EPISODES, "team-a_job", EPISODE))
    await server.kill()
    with pytest.raises(BusUnavailable, match=r"cannot be reached .*: is it running\?"):
        await hasty.publish(EPISODE, b"given up", message_id="1")
    with pytest.raises(BusUnavailable):
        await bucket.put("team-a.job", b"given up")
    with pytest.raises(BusUnavailable):
        await hasty.send("gen.team-a.job.agent", b"given up")
    assert await consumer.fetch(1, 0.1) == []
    await server.restart()
    assert await persist(lambda: hasty.replay(EPISODES, EPISODE)) == []
    assert await persist(bucket.entries) == []


async def test_a_hung_server_is_an_outage(server: EmbeddedNats, hasty: Bus) -> None:
    assert server.pid is not None
    consumer = await persist(lambda: hasty.consumer(EPISODES, "team-a_job", EPISODE))
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.to_thread(os.waitpid, server.pid, os.WUNTRACED)
    with pytest.raises(BusUnavailable, match="no answer on"):
        await hasty.publish(EPISODE, b"1", message_id="1")
    assert await soon(consumer.fetch(1, 0.1)) == []
    os.kill(server.pid, signal.SIGCONT)
    await persist(lambda: hasty.publish(EPISODE, b"1", message_id="1"))
    assert len(await persist(lambda: hasty.replay(EPISODES, EPISODE))) == 1
    assert len(await soon(consumer.fetch(1, 60))) == 1


async def test_closing_during_an_outage_ends_everything(server: EmbeddedNats, bus: Bus) -> None:
    heard: asyncio.Queue[Request] = asyncio.Queue()

    async def listen() -> None:
        async with bus.listen("gen.team-a.>", heard.put):
            await asyncio.Event().wait()

    listening = asyncio.create_task(listen())
    consumer = await bus.consumer(TASKS, "team-a_job", TASK)
    fetching = asyncio.create_task(consumer.fetch(1, 60))
    assert await consumer.fetch(1, 0.05) == []
    await server.kill()
    await soon(bus.close())
    for task in (listening, fetching):
        with pytest.raises(BusRefused, match="is closed"):
            await soon(task)


async def test_connecting_waits_for_a_server_that_comes_late(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path)
    await server.start()
    await server.kill()
    connecting = asyncio.create_task(connect(server.url, name="early"))
    await asyncio.sleep(0)
    await server.restart()
    bus = await soon(connecting)
    await bus.ensure()
    await bus.close()
    await server.stop()


async def test_connecting_to_nobody_says_where(tmp_path: Path) -> None:
    with pytest.raises(BusUnavailable, match=r"NATS at 127\.0\.0\.1:9 cannot be reached .*is it running\?"):
        await connect("nats://user:hidden@127.0.0.1:9", name="lost", connect_timeout_s=0.3)


async def test_a_full_disk_is_named_and_passes_with_a_restart(server: EmbeddedNats, hasty: Bus) -> None:
    assert server.pid is not None
    await persist(lambda: hasty.publish(EPISODE, b"before", message_id="0"))
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(BusUnavailable, match="its disk may be full"):
        await hasty.publish(EPISODE, bytes(200_000), message_id="1")
    assert any("file too large" in line for line in server.errors())
    await server.restart()
    await persist(lambda: hasty.publish(EPISODE, bytes(200_000), message_id="1"))
    stored = await persist(lambda: hasty.replay(EPISODES, EPISODE))
    assert [len(one.data) for one in stored] == [6, 200_000]


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
        following = asyncio.create_task(anext(entries))
        await server.restart()
        await persist(lambda: bucket.delete("team-a.gone"))
        while (entry := await soon(following)).key != "team-a.gone" or entry.data is not None:
            following = asyncio.create_task(anext(entries))
        assert [one.key for one in await persist(bucket.entries)] == ["team-a.stays"]
