"""Connecting to the server of environments in another container: what listens there may be anything. In virtual time."""

import asyncio
import contextlib
import socket
from functools import partial
from pathlib import Path

import pytest

from marlaas_worker.sandbox.children import Children
from marlaas_worker.sandbox.server import BrokenEnvironment, ForkServerLost
from marlaas_worker.sandbox.server_start import ChildrenConfig, connect_server
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy
DEEP = b"[" * 60_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "environment.sock"


@pytest.fixture
def config(tmp_path: Path) -> ChildrenConfig:
    return ChildrenConfig("", {}, 1 << 29, 60.0, tmp_path / "unused", {})


async def test_nobody_listening_is_a_loss_of_the_fork_server(config, path):
    with pytest.raises(ForkServerLost, match=r"does not listen on .*environment\.sock .*; its log says why"):
        await connect_server(config, path)
    assert virtual_time.now() - virtual_time.START == pytest.approx(60.0, abs=1.0)


async def test_a_socket_of_another_kind_is_no_server_of_environments(config, path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(BrokenEnvironment, match=r"not the socket of an environment server: Protocol wrong type"):
            await connect_server(config, path)


@pytest.mark.parametrize(
    "said",
    [b"garbage", b"[]", DEEP, b'{"report": "broken"}', b'{"report": "ready", "x": 1}', b'{"report": "ready"}'],
    ids=["garbage", "list", "deep", "broken", "more", "ready"],
)
@pytest.mark.parametrize(
    "later",
    [
        b'{"report": "ended", "number": "x", "status": -4000, "cause": []}',
        DEEP,
        b'{"report": "ended", "number": 1e999}',
    ],
    ids=["no number", "deep", "infinite"],
)
async def test_what_listens_may_say_anything_and_harms_nobody(config, path, said, later):
    """The socket's folder is the environment's as well: any of its code may listen there."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen()

        async def impostor() -> None:
            connection, _ = await loop.sock_accept(listener)
            with connection, contextlib.suppress(OSError):
                for packet in (said, later):
                    await loop.sock_recv(connection, 1024)
                    connection.send(packet)
                await loop.sock_recv(connection, 1024)

        answering = asyncio.create_task(impostor())
        children = Children(partial(connect_server, config, path))
        with contextlib.suppress(BrokenEnvironment, ForkServerLost):
            async with children.child() as child:
                await child.ended
                assert child.ended.result().status is None
        await children.close()
        await answering
