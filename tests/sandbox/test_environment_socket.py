"""Environments with an image of their own: a supervisor, and a server of environments in a process that is none of its children."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.killing import assert_gone
from tests.tables import rows

from marlaas_api.errors import InvalidInput
from marlaas_api.messages import FaultClass
from marlaas_worker.sandbox.server import Children
from marlaas_worker.sandbox.server_start import ChildrenConfig, connect_server

pytestmark = pytest.mark.processes

MEMORY_BYTES = 1 << 29


class Container:
    def __init__(self, folder):
        self.socket = folder / "environment.sock"
        self.variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "SECRET": "1"}
        self.variables["MARLAAS_ENVIRONMENT_SOCKET"] = str(self.socket)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, name):
        command = [sys.executable, "-m", "marlaas", "env", "serve", name]
        self.process = subprocess.Popen(command, env=self.variables, start_new_session=True)

    def kill(self):
        """SIGKILL to the server alone; what it had started has to go by itself."""
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.process.terminate()
        return self.process.wait(30)


@pytest.fixture
def container(tmp_path):
    made = Container(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.kill()


@pytest.fixture
def config(tmp_path):
    def make(load_timeout_s=60.0, **args: object):
        return ChildrenConfig("", args, MEMORY_BYTES, load_timeout_s, tmp_path / "unused", {})

    return make


def with_image(harness, **environment: object):
    """A job whose environment says nothing but its image, its command and its arguments."""
    document = harness.document("placeholder:play", **environment)
    own = {"name": None, "image": "registry/team-a/env:1", "entrypoint": ("marlaas", "env", "serve", "rogues:asks")}
    spec = document.spec.model_copy(update={"environment": document.spec.environment.model_copy(update=own)})
    return document.model_copy(update={"spec": spec})


async def test_episodes_are_played_in_the_other_container_once_it_has_loaded(harness, container):
    document = with_image(harness, args={"turns": 3})
    async with harness.open(document, socket=container.socket) as context:
        assert not context.metrics.ready()
        container.start("rogues:asks")
        await harness.put_task(harness.task(document, group_size=4))
        episodes = await harness.episodes(4)
        assert context.metrics.ready()
        outcomes = {one.labels.get("outcome"): one.value for one in context.metrics.samples()}
        assert outcomes["completed"] == 4
    found = [(episode.fault, episode.num_turns, episode.rewards) for episode in episodes]
    assert found == [(None, 3, {"policy": 1.0})] * 4


@pytest.mark.parametrize(("name", "args", "words"), rows(__file__, "not_served"))
async def test_an_environment_that_cannot_be_loaded_is_a_fault_in_its_own_words(harness, container, name, args, words):
    """Arguments may have nearly the largest size."""
    container.start(name)
    args = {argument: text * 60_000 for argument, text in args.items()}
    (episode,) = await harness.play_document(with_image(harness, args=args), socket=container.socket)
    assert episode.fault is FaultClass.ENV
    assert words in episode.fault_text


async def test_a_container_that_does_not_listen_is_a_fault_of_the_infrastructure(harness, container):
    harness.load_timeout_s = 0.0
    (episode,) = await harness.play_document(with_image(harness), socket=container.socket)
    assert (episode.fault, "does not listen on" in episode.fault_text) == (FaultClass.INFRA, True)


async def test_killed_in_an_episode_the_container_restarts_and_the_next_attempt_is_unharmed(harness, container):
    container.start("rogues:asks")
    document = with_image(harness, max_attempts=3)
    harness.rollout.answer = lambda request: [harness.rollout.beat(request)]
    async with harness.open(document, socket=container.socket):
        await harness.put_task(harness.task(document, group_size=2))
        await harness.rollout.until(lambda: len({request.member for request in harness.rollout.requests}) == 2)
        container.kill()
        harness.rollout.answer = lambda request: [harness.rollout.result(request, "1")]
        container.start("rogues:asks")
        episodes = await harness.episodes(2)
    assert [(episode.fault, episode.prior_faults) for episode in episodes] == [(None, (FaultClass.INFRA,))] * 2


async def test_what_an_episode_had_started_goes_with_the_server_that_is_killed(harness, container, tmp_path):
    container.variables["PYTHONUNBUFFERED"] = "1"
    container.start("rogues:hangs_with_a_child")
    children = Children(
        partial(connect_server, ChildrenConfig("", {}, MEMORY_BYTES, 60.0, tmp_path, {}), container.socket)
    )
    try:
        async with children.child() as child:
            start = {"split": "train", "index": 0, "seed": 0, "agents": ["policy"], "temperature": 1.0}
            body = json.dumps(start).encode()
            child.writer.write(len(body).to_bytes(4, "big") + body)
            await child.output.wait_for_text(b"ready", 30.0)
            keeper, episode, detached = map(int, child.output.text().removesuffix("ready").split())
            handles = [os.pidfd_open(pid) for pid in (keeper, episode)]
            container.kill()
            await child.ended
            await asyncio.to_thread(assert_gone, *handles)
            os.kill(detached, signal.SIGKILL)  # A real container ends with its first process.
    finally:
        await children.close()


async def test_one_supervisor_is_served_at_a_time_and_the_next_one_gets_a_process_of_its_own(container, config):
    container.start("rogues:asks")
    first = await connect_server(config(), container.socket)
    second = asyncio.create_task(connect_server(config(turns=2), container.socket))
    assert await asyncio.wait({second}, timeout=0.2) == (set(), {second})
    await first.end()
    await (await second).end()
    assert await asyncio.to_thread(container.stop) == 0, "told to stop with nobody there it ends"


async def test_told_to_stop_it_lets_the_supervisor_end_first(harness, container):
    container.start("rogues:asks")
    document = with_image(harness)
    harness.rollout.answer = lambda request: []
    async with harness.open(document, socket=container.socket) as context:
        await harness.put_task(harness.task(document))
        await harness.rollout.until(lambda: len(harness.rollout.requests) > 0)
        container.process.send_signal(signal.SIGTERM)
        context.stop.set()
        await harness.rollout.answer_open()
        (episode,) = await harness.episodes(1)
    assert episode.fault is None
    assert await asyncio.to_thread(container.process.wait, 30) == 0
    assert not container.socket.exists()


async def test_an_image_without_a_container_for_it_is_refused(harness):
    with pytest.raises(ExceptionGroup) as caught:
        async with harness.open(with_image(harness)):
            pass
    assert caught.group_contains(InvalidInput, match="runs in a container of its own")


def test_a_socket_that_cannot_be_made_is_said(container, tmp_path):
    container.variables["MARLAAS_ENVIRONMENT_SOCKET"] = str(tmp_path / "nowhere" / "a.sock")
    command = [sys.executable, "-m", "marlaas", "env", "serve", "rogues:asks"]
    done = subprocess.run(command, env=container.variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot listen on " in done.stderr
    assert "No such file or directory" in done.stderr
