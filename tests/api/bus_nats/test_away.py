"""A real server that is killed, hangs, comes late, is full, or refuses. What every bus promises is in tests/api/bus_contract."""

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from tests.api.bus_contract.conftest import soon

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusRefused, BusUnavailable, Request
from marlaas_api.bus_nats import NatsBus, connect
from marlaas_api.bus_nats.dial import Dial
from marlaas_api.bus_nats.link import Link
from marlaas_api.nats_server import EmbeddedNats

T = TypeVar("T")
EPISODES, TASKS = subjects.EPISODES, subjects.TASKS
EPISODE, TASK = subjects.episode("team-a", "job"), subjects.task("team-a", "job")
USERS = Path(__file__).with_name("users.conf").read_text(encoding="utf-8")


async def persist(call: Callable[[], Awaitable[T]]) -> T:
    """As callers do: what is Retryable is tried again."""
    while True:
        try:
            return await call()
        except BusUnavailable:
            continue


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
    """A client that gives up soon; what it gives up is tried again (`persist`)."""
    link = Link(Dial(server.url, "hasty", answer_s=0.5))
    await link.open(60)
    yield NatsBus(link)
    await link.close()


@pytest.fixture(scope="package")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A server with users; gives a user's URL."""
    server = EmbeddedNats(tmp_path_factory.mktemp("guarded"), extra_config=USERS)
    asyncio.run(server.start())
    asyncio.run(ensure(f"nats://admin:secret@127.0.0.1:{server.port}"))
    yield lambda user: f"nats://{user}:secret@127.0.0.1:{server.port}"
    asyncio.run(server.stop())


async def ensure(url: str) -> None:
    admin = await connect(url, name="admin")
    await admin.ensure()
    await admin.close()


@pytest.fixture
async def sandbox(guarded: Callable[[str], str]) -> AsyncIterator[Bus]:
    bus = await connect(guarded("sandbox"), name="sandbox-1")
    yield bus
    await bus.close()


pytestmark = pytest.mark.processes


async def test_without_a_server_calls_give_up_and_what_was_given_up_never_happens(server, hasty):
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


async def test_a_hung_server_is_an_outage(server, hasty):
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


async def test_closing_during_an_outage_ends_everything(server, bus):
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


async def test_connecting_waits_for_a_server_that_comes_late(tmp_path):
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


async def test_connecting_to_nobody_says_where(tmp_path):
    with pytest.raises(BusUnavailable, match=r"NATS at 127\.0\.0\.1:9 cannot be reached .*is it running\?"):
        await connect("nats://user:hidden@127.0.0.1:9", name="lost", connect_timeout_s=0.3)


async def test_a_full_disk_is_named_and_passes_with_a_restart(server, hasty):
    await persist(lambda: hasty.publish(EPISODE, b"before", message_id="0"))
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(BusUnavailable, match="its disk may be full"):
        await hasty.publish(EPISODE, bytes(200_000), message_id="1")
    assert any("file too large" in line for line in server.errors())
    await server.restart()
    await persist(lambda: hasty.publish(EPISODE, bytes(200_000), message_id="1"))
    stored = await persist(lambda: hasty.replay(EPISODES, EPISODE))
    assert [len(one.data) for one in stored] == [6, 200_000]


async def test_nothing_acked_is_lost_when_the_server_is_killed_while_many_publish(server, bus):
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


async def test_settling_what_a_killed_server_forgot_says_so_at_once(server, bus):
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


async def test_a_watch_hears_of_a_key_that_went_while_it_was_away(server, bus):
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


async def test_what_is_forbidden_is_refused_by_subject(sandbox, caplog):
    first = await sandbox.publish(TASK, b"1")
    consumer = await sandbox.consumer(TASKS, "team-a_job", TASK)
    async with (await sandbox.bucket(subjects.JOBS)).watch() as entries:
        for call, subject in (
            (sandbox.publish("episode.Team-B.job", b"1"), r'does not let sandbox-1 publish to "episode\.Team-B\.job"'),
            (sandbox.last(TASKS, TASK), f"DIRECT.GET.TASKS.{TASK}"),
            (sandbox.replay(TASKS, TASK), r"DIRECT\.GET\.TASKS"),
            (sandbox.purge(TASKS, TASK), r"STREAM\.PURGE\.TASKS"),
            *((consumer.fetch(1, 60), r"CONSUMER\.MSG\.NEXT\.TASKS\.team-a_job") for _ in range(2)),
            (anext(entries), r"DIRECT\.GET\.KV_jobs"),
        ):
            with pytest.raises(BusRefused, match=subject):
                await soon(call)
    assert await sandbox.publish(TASK, b"2") == first + 1
    heard: asyncio.Queue[Request] = asyncio.Queue()
    with pytest.raises(BusRefused, match=r'does not let sandbox-1 listen to "gen\.team-b\.>"'):
        async with sandbox.listen("gen.team-b.>", heard.put):
            pytest.fail("the block began")
    async with sandbox.listen("gen.team-a.>", heard.put, queue="rollout"):
        await sandbox.send("gen.team-b.job.agent", b"1")
        await sandbox.publish(TASK, b"a round trip")
    assert 'publish to "gen.team-b.job.agent"' in caplog.text
    with pytest.raises(BusRefused, match=r'"gen\.team-b\.job\.agent"'):
        await sandbox.send("gen.team-b.job.agent", b"1")


async def test_an_inbox_of_its_own_has_to_be_said(guarded):
    with pytest.raises(BusRefused, match='listen to "_INBOX'):
        await soon(connect(guarded("deaf"), name="deaf"))
    bus = await connect(guarded("deaf"), name="deaf", inbox_prefix="_INBOX_deaf")
    assert await bus.publish(TASK, b"1") > 0
    assert bus.new_inbox().startswith("_INBOX_deaf.")
    await bus.close()


async def test_wrong_credentials_are_refused_at_once(guarded):
    with pytest.raises(BusRefused, match=r"rejects worker-1.*check its credentials") as refused:
        await soon(connect(guarded("admin").replace("secret", "guess"), name="worker-1", connect_timeout_s=60))
    assert "guess" not in str(refused.value)


async def test_a_missing_credentials_file_is_named_and_what_is_no_url_is_refused(tmp_path):
    with pytest.raises(BusRefused, match=f"{tmp_path}/user.creds"):
        await connect("nats://127.0.0.1:9", name="x", creds=tmp_path / "user.creds")
    for url in ("nats://", "nats://host:port"):
        with pytest.raises(BusRefused, match="cannot connect to NATS"):
            await soon(connect(url, name="x", connect_timeout_s=60))


async def test_a_server_without_jetstream_says_so(tmp_path):
    accounts = "accounts { A { users: [{ user: a, password: a }] } }"
    async with EmbeddedNats(tmp_path, extra_config=accounts) as server:
        bus = await connect(f"nats://a:a@127.0.0.1:{server.port}", name="x")
        with pytest.raises((BusUnavailable, BusRefused), match=r"(?i)jetstream.*not enabled"):
            await bus.ensure()
        await bus.close()
