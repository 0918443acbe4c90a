"""What only a real server can do: die, hang, run full, refuse. The contract itself is in test_bus_contract.py."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusRefused, BusUnavailable, Request
from marlaas_api.bus_nats import NatsBus, connect
from marlaas_api.bus_nats.dial import Dial
from marlaas_api.bus_nats.link import Link
from marlaas_api.nats_server import EmbeddedNats

T = TypeVar("T")
EPISODES, TASKS = subjects.EPISODES, subjects.TASKS
EPISODE, TASK = subjects.episode("team-a", "job"), subjects.task("team-a", "job")
USERS = """
authorization {
  users = [
    { user: admin, password: secret }
    { user: sandbox, password: secret, permissions: {
        publish: ["task.team-a.>", "$JS.API.STREAM.INFO.*", "$JS.API.CONSUMER.CREATE.TASKS.>"]
        subscribe: ["_INBOX.>", "gen.team-a.>"] } }
    { user: deaf, password: secret, permissions: { publish: ">", subscribe: "_INBOX_deaf.>" } }
  ]
}
"""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    async with EmbeddedNats(tmp_path / "nats") as server:
        yield server


@pytest.fixture
async def bus(server: EmbeddedNats) -> AsyncIterator[Bus]:
    bus = await connect(server.url, name="test")
    await bus.ensure()
    yield bus
    await bus.close()


@pytest.fixture
async def hasty(server: EmbeddedNats, bus: Bus) -> AsyncIterator[Bus]:
    """A client that gives up soon."""
    link = Link(Dial(server.url, "hasty", answer_s=0.5))
    await link.open(5)
    yield NatsBus(link)
    await link.close()


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 15)


async def persist(call: Callable[[], Awaitable[T]]) -> T:
    """As callers do: what is Retryable is tried again."""
    while True:
        try:
            return await call()
        except BusUnavailable:
            continue


# Killed and started again


async def test_nothing_acked_is_lost_when_the_server_is_killed_while_many_publish(
    server: EmbeddedNats, bus: Bus
) -> None:
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


async def test_a_publish_under_way_when_the_server_dies_happens_once(server: EmbeddedNats, bus: Bus) -> None:
    await server.kill()
    waiting = asyncio.create_task(bus.publish(EPISODE, b"1", message_id="one", expect_last=0))
    await server.restart()
    sequence = await soon(waiting)
    assert [stored.sequence for stored in await bus.replay(EPISODES, EPISODE)] == [sequence]


async def test_a_waiting_fetch_lives_through_a_restart(server: EmbeddedNats, bus: Bus) -> None:
    consumer = await bus.consumer(TASKS, "team-a_job", TASK)
    waiting = asyncio.create_task(consumer.fetch(10, 60))
    assert await soon(consumer.fetch(10, 0.05)) == []
    await server.restart()
    await persist(lambda: bus.publish(TASK, b"1", message_id="1"))
    (delivery,) = await soon(waiting)
    await delivery.ack()
    assert await bus.replay(TASKS, TASK) == []


async def test_every_task_is_worked_through_kills(server: EmbeddedNats, bus: Bus) -> None:
    for number in range(300):
        await bus.publish(TASK, b"%d" % number)
    milestones = {50: asyncio.Event(), 150: asyncio.Event()}
    worked: set[bytes] = set()

    async def work() -> None:
        consumer = await bus.consumer(TASKS, "team-a_job", TASK, ack_wait_s=1.0)
        while len(worked) < 300:
            for delivery in await consumer.fetch(7, 1):
                worked.add(delivery.stored.data)
                if len(worked) in milestones:
                    milestones[len(worked)].set()
                try:
                    await delivery.ack()
                except BusUnavailable:
                    continue

    workers = [asyncio.create_task(work()) for _ in range(3)]
    for milestone in milestones.values():
        await soon(milestone.wait())
        await server.restart()
    for worker in workers:
        await soon(worker)
    assert worked == {b"%d" % number for number in range(300)}


async def test_settling_what_a_killed_server_forgot_says_so_at_once(server: EmbeddedNats, bus: Bus) -> None:
    await bus.publish(EPISODE, b"1")
    consumer = await bus.consumer(EPISODES, "team-a_job", EPISODE, ack_wait_s=1.0)
    (delivery,) = await soon(consumer.fetch(1, 5))
    await server.restart()
    refused = await asyncio.gather(delivery.ack(), return_exceptions=True)
    if refused != [None]:
        assert "delivers it again" in str(refused[0])
        (again,) = await soon(consumer.fetch(1, 10))
        await again.ack()
    assert await soon(consumer.fetch(1, 0.05)) == []


async def test_a_watch_tells_everything_again_after_a_restart(server: EmbeddedNats, bus: Bus) -> None:
    bucket = await bus.bucket(subjects.POLICY)
    await bucket.put("team-a.job.agent", b"1")
    await bucket.put("team-a.job.other", b"x")
    async with bucket.watch("team-a.") as entries:
        assert [(await soon(anext(entries))).data for _ in range(2)] == [b"1", b"x"]
        await server.restart()
        assert [(await soon(anext(entries))).data for _ in range(2)] == [b"1", b"x"]
        await bucket.put("team-a.job.agent", b"2")
        assert (await soon(anext(entries))).data == b"2"


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


async def test_a_listener_hears_again_after_a_restart(server: EmbeddedNats, bus: Bus) -> None:
    heard: asyncio.Queue[Request] = asyncio.Queue()
    async with bus.listen("gen.team-a.>", heard.put, queue="rollout"):
        await server.restart()
        await persist(lambda: bus.send("gen.team-a.job.agent", b"1"))
        assert (await soon(heard.get())).data == b"1"


async def test_buckets_and_logs_are_there_after_a_restart(server: EmbeddedNats, bus: Bus) -> None:
    bucket = await bus.bucket(subjects.POLICY)
    revision = await bucket.create("team-a.job.agent", b"1")
    await bus.publish(EPISODE, b"1")
    await server.restart()
    entry = await bucket.get("team-a.job.agent")
    assert entry is not None
    assert (entry.data, entry.revision) == (b"1", revision)
    assert len(await bus.replay(EPISODES, EPISODE)) == 1


async def test_a_graceful_stop_is_an_outage_like_any_other(server: EmbeddedNats, bus: Bus) -> None:
    await server.stop()
    waiting = asyncio.create_task(bus.publish(EPISODE, b"1", message_id="1"))
    await server.start()
    assert await soon(waiting) == 1


# Away


async def test_without_a_server_calls_give_up_and_what_was_given_up_never_happens(
    server: EmbeddedNats, hasty: Bus
) -> None:
    bucket = await hasty.bucket(subjects.PROGRESS)
    consumer = await hasty.consumer(EPISODES, "team-a_job", EPISODE)
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
    consumer = await hasty.consumer(EPISODES, "team-a_job", EPISODE)
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.to_thread(os.waitpid, server.pid, os.WUNTRACED)
    with pytest.raises(BusUnavailable, match="no answer on"):
        await hasty.publish(EPISODE, b"1", message_id="1")
    assert await soon(consumer.fetch(1, 0.1)) == []
    os.kill(server.pid, signal.SIGCONT)
    await persist(lambda: hasty.publish(EPISODE, b"1", message_id="1"))
    assert len(await hasty.replay(EPISODES, EPISODE)) == 1
    assert len(await soon(consumer.fetch(1, 5))) == 1


async def test_who_gave_up_listening_to_a_hung_server_takes_nothing_from_others(server: EmbeddedNats, bus: Bus) -> None:
    assert server.pid is not None
    heard: asyncio.Queue[Request] = asyncio.Queue()

    async def listen() -> None:
        async with bus.listen("gen.team-a.>", heard.put, queue="rollout"):
            pytest.fail("the block began")

    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.to_thread(os.waitpid, server.pid, os.WUNTRACED)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(listen(), 0.2)
    os.kill(server.pid, signal.SIGCONT)
    async with bus.listen("gen.team-a.>", heard.put, queue="rollout"):
        for number in range(30):
            await bus.send("gen.team-a.job.agent", b"%d" % number)
        assert [(await soon(heard.get())).data for _ in range(30)] == [b"%d" % number for number in range(30)]


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


# Full


async def test_a_full_disk_is_named_and_passes_with_a_restart(server: EmbeddedNats, hasty: Bus) -> None:
    assert server.pid is not None
    await hasty.publish(EPISODE, b"before")
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(BusUnavailable, match="its disk may be full"):
        await hasty.publish(EPISODE, bytes(200_000), message_id="1")
    assert any("file too large" in line for line in server.errors())
    await server.restart()
    await persist(lambda: hasty.publish(EPISODE, bytes(200_000), message_id="1"))
    assert [len(stored.data) for stored in await hasty.replay(EPISODES, EPISODE)] == [6, 200_000]


async def test_more_unacked_messages_than_the_account_allows_are_refused(tmp_path: Path) -> None:
    limits = "accounts { A { jetstream: { max_ack_pending: 10 }, users: [{ user: a, password: a }] } }"
    async with EmbeddedNats(tmp_path, extra_config=limits) as server:
        bus = await connect(f"nats://a:a@127.0.0.1:{server.port}", name="trainer")
        await bus.ensure()
        with pytest.raises(BusRefused, match="max ack pending exceeds system limit of 10"):
            await bus.consumer(EPISODES, "team-a_job", EPISODE)
        await bus.close()


# Refused


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Callable[[str], str]]:
    """A server with users; gives a user's URL."""
    async with EmbeddedNats(tmp_path / "guarded", extra_config=USERS) as server:
        admin = await connect(f"nats://admin:secret@127.0.0.1:{server.port}", name="admin")
        await admin.ensure()
        await admin.close()
        yield lambda user: f"nats://{user}:secret@127.0.0.1:{server.port}"


@pytest.fixture
async def sandbox(guarded: Callable[[str], str]) -> AsyncIterator[Bus]:
    bus = await connect(guarded("sandbox"), name="sandbox-1")
    yield bus
    await bus.close()


async def test_a_forbidden_publish_is_refused_by_subject(sandbox: Bus) -> None:
    assert await sandbox.publish(TASK, b"1") == 1
    with pytest.raises(BusRefused, match=r'does not let sandbox-1 publish to "episode\.Team-B\.job"'):
        await soon(sandbox.publish("episode.Team-B.job", b"1"))
    assert await sandbox.publish(TASK, b"2") == 2


async def test_a_forbidden_read_is_refused_by_subject(sandbox: Bus) -> None:
    await sandbox.publish(TASK, b"1")
    with pytest.raises(BusRefused, match=f"DIRECT.GET.TASKS.{TASK}"):
        await soon(sandbox.last(TASKS, TASK))
    with pytest.raises(BusRefused, match=r"DIRECT\.GET\.TASKS"):
        await soon(sandbox.replay(TASKS, TASK))
    with pytest.raises(BusRefused, match=r"STREAM\.PURGE\.TASKS"):
        await soon(sandbox.purge(TASKS, TASK))


async def test_a_forbidden_fetch_is_refused_by_subject(sandbox: Bus) -> None:
    consumer = await sandbox.consumer(TASKS, "team-a_job", TASK)
    for _ in range(2):
        with pytest.raises(BusRefused, match=r"CONSUMER\.MSG\.NEXT\.TASKS\.team-a_job"):
            await soon(consumer.fetch(1, 60))


async def test_a_forbidden_watch_is_refused_by_subject(sandbox: Bus) -> None:
    bucket = await sandbox.bucket(subjects.JOBS)
    async with bucket.watch() as entries:
        with pytest.raises(BusRefused, match=r"DIRECT\.GET\.KV_jobs"):
            await soon(anext(entries))


async def test_a_forbidden_listener_does_not_wait_in_silence(sandbox: Bus) -> None:
    heard: asyncio.Queue[Request] = asyncio.Queue()
    with pytest.raises(BusRefused, match=r'does not let sandbox-1 listen to "gen\.team-b\.>"'):
        async with sandbox.listen("gen.team-b.>", heard.put):
            pytest.fail("the block began")
    async with sandbox.listen("gen.team-a.>", heard.put, queue="rollout"):
        pass


async def test_a_forbidden_send_is_refused_the_next_time(sandbox: Bus, caplog: pytest.LogCaptureFixture) -> None:
    await sandbox.send("gen.team-b.job.agent", b"1")
    await sandbox.publish(TASK, b"a round trip")
    assert 'publish to "gen.team-b.job.agent"' in caplog.text
    with pytest.raises(BusRefused, match=r'"gen\.team-b\.job\.agent"'):
        await sandbox.send("gen.team-b.job.agent", b"1")


async def test_an_inbox_of_its_own_has_to_be_said(guarded: Callable[[str], str]) -> None:
    with pytest.raises(BusRefused, match='listen to "_INBOX'):
        await soon(connect(guarded("deaf"), name="deaf"))
    bus = await connect(guarded("deaf"), name="deaf", inbox_prefix="_INBOX_deaf")
    assert await bus.publish(TASK, b"1") == 1
    assert bus.new_inbox().startswith("_INBOX_deaf.")
    await bus.close()


async def test_wrong_credentials_are_refused_at_once(guarded: Callable[[str], str]) -> None:
    with pytest.raises(BusRefused, match=r"rejects worker-1.*check its credentials") as refused:
        await soon(connect(guarded("admin").replace("secret", "guess"), name="worker-1", connect_timeout_s=60))
    assert "guess" not in str(refused.value)


async def test_a_missing_credentials_file_is_named(server: EmbeddedNats, tmp_path: Path) -> None:
    with pytest.raises(BusRefused, match=f"{tmp_path}/user.creds"):
        await connect(server.url, name="x", creds=tmp_path / "user.creds")


@pytest.mark.parametrize("url", ["nats://", "nats://host:port"])
async def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BusRefused, match="cannot connect to NATS"):
        await soon(connect(url, name="x", connect_timeout_s=60))


async def test_a_server_without_jetstream_says_so(tmp_path: Path) -> None:
    accounts = "accounts { A { users: [{ user: a, password: a }] } }"
    async with EmbeddedNats(tmp_path, extra_config=accounts) as server:
        bus = await connect(f"nats://a:a@127.0.0.1:{server.port}", name="x")
        with pytest.raises((BusUnavailable, BusRefused), match=r"(?i)jetstream.*not enabled"):
            await bus.ensure()
        await bus.close()
