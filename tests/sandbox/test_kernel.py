"""What is asked of Linux, seen from outside: who may look, and who outlives whom."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

SPY = """
import os, subprocess
from marlaas_worker.sandbox import kernel
if os.geteuid() == 0:
    os.setuid(65534)
    kernel.be_like_siblings()  # changing the user hides a process as well: undo that
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
