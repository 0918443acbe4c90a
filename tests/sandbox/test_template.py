"""The template of fork servers: what it forks plays as what exec starts, and ends with what it must end with."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.killing import assert_gone

from marlaas_worker.sandbox import server_start
from marlaas_worker.sandbox.channel import encode_frame, read_frame
from marlaas_worker.sandbox.children import Children
from marlaas_worker.sandbox.seclusion import clean_variables
from marlaas_worker.sandbox.server_start import ChildrenConfig, start_server

pytestmark = pytest.mark.processes

START = {"split": "train", "index": 3, "seed": 5, "agents": ["policy"]}


@dataclass
class RunningTemplate:
    process: subprocess.Popen[bytes]
    requests: socket.socket

    def end(self):
        self.process.kill()
        self.process.wait()

    def config(self, scratch, name="rogues:asks"):
        return ChildrenConfig(name, {}, 1 << 29, 30.0, scratch, VARIABLES, template=self.requests)


VARIABLES = {**clean_variables(os.environ), "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture
def template():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-P", "-s", "-m", "marlaas_worker.sandbox.template", str(theirs.fileno())]
        running = RunningTemplate(subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=VARIABLES), ours)
        theirs.close()
        yield running
        running.end()


@contextlib.asynccontextmanager
async def opened(config):
    children = Children(partial(start_server, config))
    try:
        yield children
    finally:
        await children.close()


async def first_turn(child):
    child.writer.write(encode_frame(START))
    return json.loads(await read_frame(child.reader))


async def fork_server(child):
    while child.number not in child.server.pids:  # noqa: ASYNC110 (reports have no event)
        await asyncio.sleep(0)
    return psutil.Process(child.server.pids[child.number]).parent()


async def test_a_fork_server_that_is_forked_plays_as_one_that_is_started_by_exec(template, tmp_path):
    found = []
    forked = template.config(tmp_path / "forked", "calculator")
    executed = ChildrenConfig("calculator", {}, 1 << 29, 30.0, tmp_path / "executed", VARIABLES)
    for config in (forked, executed):
        async with opened(config) as children, children.child() as child:
            server = await fork_server(child)
            assert os.getsid(server.pid) == server.pid
            variables = server.environ()
            found.append((await first_turn(child), variables["PYTHONHASHSEED"], sorted(variables.keys() - {"_"})))
            assert (server.ppid() == template.process.pid) == (config is forked)
            assert server.rlimit(psutil.RLIMIT_NOFILE)[1] == psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[1]
    assert found[0] == found[1]


async def test_the_end_of_a_forked_fork_server_is_noticed_and_another_is_forked(template, tmp_path):
    async with opened(template.config(tmp_path)) as children:
        async with children.child() as child:
            server = await fork_server(child)
            server.kill()
            assert (await child.ended).status is None
            await child.server.lost.wait()
        async with children.child() as child:
            another = await fork_server(child)
            assert another.ppid() == template.process.pid
            assert another.pid != server.pid


async def test_fork_servers_outlive_a_template_that_is_killed_and_the_next_is_started_by_exec(template, tmp_path):
    async with opened(template.config(tmp_path / "one")) as first, opened(template.config(tmp_path / "two")) as second:
        async with first.child():
            template.end()
        async with first.child() as child:
            assert (await first_turn(child))["kind"] == "turn"
        async with second.child() as child:
            assert (await fork_server(child)).ppid() == os.getpid()


async def test_a_template_that_answers_too_late_forks_nothing_that_stays(template, tmp_path, monkeypatch):
    monkeypatch.setattr(server_start, "BEGIN_S", 0.1)
    begun(template, tmp_path, "rogues:asks")[0].close()  # the template is ready
    template.process.send_signal(signal.SIGSTOP)
    async with opened(template.config(tmp_path / "one")) as children, children.child() as child:
        template.process.send_signal(signal.SIGCONT)
        assert (await fork_server(child)).ppid() == os.getpid()
        connection, process = begun(
            template, tmp_path, "rogues:asks"
        )  # it has executed the late request before this one
        with connection:
            assert json.loads(await asyncio.to_thread(connection.recv, 1024)) == {"report": "ready"}
            late = [one for one in psutil.Process(template.process.pid).children() if one.pid != pid_of(process)]
            psutil.wait_procs(late, timeout=20.0)
            assert not any(one.is_running() for one in late)
        os.close(process)


def pid_of(process):
    return int(Path(f"/proc/self/fdinfo/{process}").read_text().partition("Pid:")[2].split()[0])


def begun(template, scratch, name):
    """Ask for a fork server; return the supervisor's end of its connection, and a descriptor of its process."""
    setup = {"name": name, "args": {}, "agents": ["policy"], "memory_bytes": 1 << 29, "secluded": None, "given": {}}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    configuration, output = os.memfd_create("configuration"), os.open(os.devnull, os.O_WRONLY)
    os.write(configuration, json.dumps({**setup, "scratch": str(scratch)}).encode())
    os.lseek(configuration, 0, os.SEEK_SET)
    with theirs:
        socket.send_fds(template.requests, [b"fork"], [theirs.fileno(), output, configuration])
    os.close(configuration)
    os.close(output)
    _, (process,), _, _ = socket.recv_fds(ours, 1024, 1)
    return ours, process


@pytest.mark.parametrize(
    ("name", "flags"), [("rogues:NeverReady", None), ("rogues:asks", 0), ("rogues:asks", socket.MSG_PEEK)]
)
def test_a_fork_server_ends_with_its_supervisor_while_it_loads_and_later(template, tmp_path, name, flags):
    """If the supervisor has not read all reports, the kernel reports a reset connection, once, instead of its end."""
    connection, process = begun(template, tmp_path, name)
    if flags is not None:
        assert json.loads(connection.recv(1024, flags)) == {"report": "ready"}
    connection.close()
    assert_gone(process)


def test_what_loading_an_environment_has_started_is_killed_with_its_fork_server(template, tmp_path):
    connection, process = begun(template, tmp_path, "rogues:EndsWithAProcess")
    with connection:
        assert connection.recv(1024) == b""
    with contextlib.suppress(ProcessLookupError):
        assert_gone(os.pidfd_open(int((tmp_path / "started").read_text())))
    os.close(process)
