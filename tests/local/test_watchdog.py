import os
import subprocess
import sys

import psutil
import pytest

from marlaas.local.processes import watchdog
from marlaas.local.watchdog import kill_session, session_members, watch

TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=sys.stdout, process_group=0)
time.sleep(600)
"""


@pytest.fixture
def tree():
    """A session of two processes; the second has left its parent's process group."""
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"up\n"
        yield process
        kill_session(process.pid)


def test_a_session_ends_with_everything_in_it(tree):
    inside = [psutil.Process(pid) for pid in session_members(tree.pid)]
    assert len(inside) == 2
    kill_session(tree.pid)
    tree.wait()
    psutil.wait_procs(inside, timeout=30)
    assert session_members(tree.pid) == []
    assert os.getpid() in session_members(os.getsid(0)), "our own session is not touched"


def test_what_a_killed_leader_leaves_is_still_in_its_session(tree):
    tree.kill()
    tree.wait()
    (left,) = (psutil.Process(pid) for pid in session_members(tree.pid))
    kill_session(tree.pid)
    psutil.wait_procs([left], timeout=30)
    assert session_members(tree.pid) == []


def test_the_watchdog_keeps_only_sessions_that_have_not_ended():
    assert watch(["+10\n", "+11\n", "-10\n", "+12\n"]) == {11, 12}


def test_the_watchdog_kills_the_sessions_of_a_killed_runner(tree, tmp_path):
    (tmp_path / "left" / "by-an-engine").mkdir(parents=True)
    command = [sys.executable, "-m", "marlaas.local.watchdog", str(tmp_path / "left")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        process.stdin.write(f"+{tree.pid}\n".encode())
        process.stdin.close()
        assert process.wait() == 0
    tree.wait()
    assert session_members(tree.pid) == []
    assert not (tmp_path / "left").exists()


async def test_a_runner_whose_watchdog_was_killed_cleans_up_itself(tree):
    async with watchdog() as guard:
        guard.add(tree.pid)
        (guard.temporary / "by-an-engine").touch()
        guard._process.kill()
        await guard._process.wait()
        guard.add(12345678)  # the pipe has no reader any more
        guard.remove(12345678)
    tree.wait()
    assert session_members(tree.pid) == []
    assert not guard.temporary.exists()
