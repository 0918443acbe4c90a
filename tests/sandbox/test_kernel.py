"""What is asked of Linux, seen from outside: who may look, and who outlives whom."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from marlaas_worker.sandbox.channel import encode_frame

pytestmark = pytest.mark.processes

KINDS = (socket.SOCK_SEQPACKET, socket.SOCK_STREAM)
"""Of the fork server's connection to the supervisor, and of a child's."""
SPY = """
import os, subprocess
from marlaas_worker.sandbox import kernel
if os.geteuid() == 0:
    os.setuid(65534)
    kernel._libc.prctl(4, 1, 0, 0, 0)  # changing the user hides a process as well: undo that
look = ["cat", f"/proc/{os.getpid()}/environ"]
before = subprocess.run(look, capture_output=True).returncode
kernel.hide_from_siblings()
print(before, subprocess.run(look, capture_output=True).returncode)
"""
SUPERVISOR = """
import asyncio, sys
from functools import partial
from pathlib import Path
from marlaas_worker.sandbox.channel import encode_frame
from marlaas_worker.sandbox.children import Children
from marlaas_worker.sandbox.server_start import ChildrenConfig, start_server
from marlaas_worker.sandbox.seclusion import clean_variables
import os

async def main():
    config = ChildrenConfig("rogues:hangs_with_a_child", {}, 1 << 29, 30.0, Path(sys.argv[1]), clean_variables(os.environ))
    async with Children(partial(start_server, config)).child() as child:
        child.writer.write(encode_frame({"split": "train", "index": 0, "seed": 0, "agents": ["policy"], "temperature": 1.0}))
        await child.output.wait_for_text(b"ready", 30.0)
        print(child.output.text().removesuffix("ready"), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_other_processes_of_the_user_cannot_look_into_the_supervisor():
    done = subprocess.run([sys.executable, "-c", SPY], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1"]


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path):
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "scratch")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as supervisor:
        handles = [os.pidfd_open(int(pid)) for pid in supervisor.stdout.readline().split()]
        supervisor.send_signal(signal.SIGKILL)
    assert_gone(handles)


def assert_gone(handles):
    """The fork server, the child and its own child have exited. handles: their pidfds."""
    for handle in handles:
        gone, _, _ = select.select([handle], [], [], 20.0)
        os.close(handle)
        assert gone
    assert len(handles) == 3


def test_nothing_outlives_a_supervisor_that_is_killed_before_it_has_read_all_reports(tmp_path):
    """The kernel then reports a reset connection, once, instead of its end."""
    (ours, theirs), (channel, childs) = (socket.socketpair(socket.AF_UNIX, kind) for kind in KINDS)
    readable, writable = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "marlaas_worker.sandbox.forkserver", str(theirs.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    ) as server:
        theirs.close()
        config = {"name": "rogues:hangs_with_a_child", "args": {}, "agents": ["policy"], "memory_bytes": 1 << 29}
        given = {"scratch": str(tmp_path), "secluded": None, "given": {}}
        server.stdin.write(json.dumps(config | given).encode())
        server.stdin.close()
        assert json.loads(ours.recv(4096)) == {"report": "ready"}
        order = json.dumps({"order": "fork", "number": 0}).encode()
        socket.send_fds(ours, [order], [childs.fileno(), writable])
        start = {"split": "train", "index": 0, "seed": 0, "agents": ["policy"], "temperature": 1.0}
        channel.sendall(encode_frame(start))
        printed = b""
        while not printed.endswith(b"ready"):
            printed += os.read(readable, 4096)
        handles = [os.pidfd_open(int(pid)) for pid in printed.split()[:3]]
        ours.close()
        assert_gone(handles)
    for descriptor in (channel, childs):
        descriptor.close()
    os.close(readable)
    os.close(writable)
    assert server.returncode == 0
