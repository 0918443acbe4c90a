"""The embedded server: starts where it is told, says why it cannot, and never outlives the run."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.killing import assert_gone
from tests.tables import data

from marlaas_api.nats_server import MAX_PAYLOAD_BYTES, EmbeddedNats, ServerFailed


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    async with EmbeddedNats(tmp_path / "nats") as server:
        yield server


async def greeting(port: int | None) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return json.loads(line.removeprefix(b"INFO "))


async def test_it_listens_with_jetstream_and_room_for_large_messages(server):
    info = await greeting(server.port)
    assert info["jetstream"]
    assert info["max_payload"] == MAX_PAYLOAD_BYTES
    assert server.url == f"nats://127.0.0.1:{server.port}"


async def test_a_port_or_a_store_that_is_taken_and_a_second_start_are_errors(server, tmp_path):
    for other, words in (
        (EmbeddedNats(tmp_path / "other", port=server.port), f"port {server.port} of 127.0.0.1 is taken"),
        (EmbeddedNats(tmp_path / "nats"), f"another nats-server uses the store {tmp_path}/nats"),
        (EmbeddedNats(Path("/sys/nats")), "/sys/nats"),
        (server, "already running"),
    ):
        with pytest.raises(ServerFailed, match=words):
            await other.start()
    assert (await greeting(server.port))["port"] == server.port


async def test_killed_and_restarted_it_is_at_the_same_place(server):
    port, pid = server.port, server.pid
    await server.kill()
    assert server.pid is None
    with pytest.raises(ConnectionRefusedError):
        await greeting(port)
    await server.restart()
    assert server.port == port
    assert server.pid not in (None, pid)
    assert await greeting(port)


async def test_its_death_can_be_awaited_and_stopping_is_graceful_and_can_be_repeated(server):
    death = asyncio.create_task(server.wait())
    os.kill(server.pid, signal.SIGKILL)
    assert await death == -signal.SIGKILL
    await server.start()
    for _ in range(2):
        await server.stop()
    assert "Server Exiting" in server.log_path.read_text()


async def test_it_dies_with_a_killed_parent(tmp_path):
    command = sys.executable, "-c", data(__file__, "with_a_server"), str(tmp_path)
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    with contextlib.suppress(ProcessLookupError):
        await asyncio.to_thread(assert_gone, os.pidfd_open(pid))
    async with EmbeddedNats(tmp_path) as heir:
        assert heir.pid != pid
