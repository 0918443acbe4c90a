"""Connecting to the server of environments in another container: what listens there may be anything; and how long loading may take. In virtual time."""

import asyncio
import contextlib
import json
import socket
from functools import partial

import pytest
from tests.tables import data

from marlaas.envs.dataset.problems import SourceSilent, SourceUnavailable
from marlaas_api.errors import InvalidInput
from marlaas_worker.sandbox.forkserver import broken
from marlaas_worker.sandbox.server import BrokenEnvironment, Children, ForkServerLost
from marlaas_worker.sandbox.server_start import (
    MAX_EXTENSION,
    ChildrenConfig,
    Loaded,
    _empty_output,
    connect_server,
    wait_until_loaded,
)
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy


@pytest.fixture
def path(tmp_path):
    return tmp_path / "environment.sock"


@pytest.fixture
def config(tmp_path):
    return ChildrenConfig("", {}, 1 << 29, 60.0, tmp_path / "unused", {})


async def test_nobody_listening_is_a_lost_fork_server_and_another_socket_a_broken_environment(config, path):
    with pytest.raises(ForkServerLost, match=r"does not listen on .*environment\.sock .*; its log says why"):
        await connect_server(config, path)
    assert virtual_time.now() - virtual_time.START == pytest.approx(60.0, abs=1.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(BrokenEnvironment, match=r"not the socket of an environment server: Protocol wrong type"):
            await connect_server(config, path)


def packets(name):
    """Texts, and how often they are repeated."""
    return [pytest.param(text.encode() * times, id=key) for key, (text, times) in data(__file__, name).items()]


@pytest.mark.parametrize("said", packets("reports"))
@pytest.mark.parametrize("later", packets("later_reports"))
async def test_what_listens_may_say_anything_and_harms_nobody(config, path, said, later):
    """The socket's folder is the environment's as well: any of its code may listen there."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen()

        async def impostor():
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


LIMIT_S = 60.0


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


async def test_an_environment_that_is_short_of_cpu_has_more_time_and_is_loaded_then(ends):
    ours, theirs = ends
    readings = []

    def cpu_wait_s():
        readings.append(0.9 * LIMIT_S * (len(readings) + 1))
        if len(readings) == 4:
            theirs.send(json.dumps({"report": "ready"}).encode())
        return readings[-1]

    await wait_until_loaded(ours, _empty_output(), LIMIT_S, cpu_wait_s)
    assert virtual_time.now() - virtual_time.START == 4 * LIMIT_S


@pytest.mark.parametrize(
    ("error", "fault"), [(SourceSilent, "waited"), (SourceUnavailable, "infra"), (InvalidInput, "env")]
)
async def test_an_environment_whose_service_fails_is_no_fault_of_its_own(ends, error, fault):
    ends[1].send(json.dumps(broken(error("away"))).encode())
    with pytest.raises(BrokenEnvironment, match="away") as caught:
        await wait_until_loaded(ends[0], _empty_output(), LIMIT_S)
    assert (caught.value.fault, caught.value.is_permanent) == (fault, error is InvalidInput)


async def test_an_image_of_a_release_that_plays_no_suites_of_their_own_is_refused(ends):
    ours, theirs = ends
    theirs.send(json.dumps({"report": "ready", "suites": ["sums"]}).encode())
    theirs.send(json.dumps({"report": "ready"}).encode())
    assert await wait_until_loaded(ours, _empty_output(), LIMIT_S, suites=["sums"]) == Loaded()
    with pytest.raises(BrokenEnvironment, match=r"\(sums\): build the image from the worker image") as caught:
        await wait_until_loaded(ours, _empty_output(), LIMIT_S, suites=["sums"])
    assert caught.value.is_permanent


@pytest.mark.parametrize(
    ("part", "waited"),
    [(0.0, 1), (0.4, 1), (0.9, MAX_EXTENSION), (None, 1)],
    ids=["hangs or computes", "waits a little", "is short of CPU for ever", "in a container of its own"],
)
async def test_an_environment_is_given_up_after_its_limit_unless_it_waits_for_a_cpu(ends, part, waited):
    at = 0.0

    def cpu_wait_s():
        nonlocal at
        at += part * LIMIT_S
        return at

    with pytest.raises(BrokenEnvironment, match=f"took longer than {waited * LIMIT_S:g} s"):
        await wait_until_loaded(ends[0], _empty_output(), LIMIT_S, None if part is None else cpu_wait_s)
