"""What a server refuses is an error of whoever asked for it."""

import asyncio

import pytest
from tests.api.bus_nats.conftest import TASK, TASKS, soon

from marlaas_api import subjects
from marlaas_api.bus import BusRefused, BusUnavailable, Request
from marlaas_api.bus_nats import connect
from marlaas_api.nats_server import EmbeddedNats


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
