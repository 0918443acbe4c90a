import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from marlaas.local import processes
from marlaas.local.processes import watchdog
from marlaas.local.watchdog import kill_session, session_members, watch
from marlaas_api.errors import InvalidInput

pytestmark = pytest.mark.processes

TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=sys.stdout, process_group=0)
time.sleep(600)
"""


@pytest.fixture
def tree() -> Iterator["subprocess.Popen[bytes]"]:
    """A session of two processes; the second has left its parent's process group."""
    with subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"up\n"
        yield process
        kill_session(process.pid)


@pytest.mark.parametrize("is_leader_killed", [False, True])
def test_a_session_ends_with_everything_in_it(tree: "subprocess.Popen[bytes]", is_leader_killed: bool) -> None:
    inside = [psutil.Process(pid) for pid in session_members(tree.pid)]
    assert len(inside) == 2
    if is_leader_killed:
        tree.kill()
        tree.wait()
    kill_session(tree.pid)
    tree.wait()
    psutil.wait_procs(inside, timeout=30)
    assert session_members(tree.pid) == []
    assert os.getpid() in session_members(os.getsid(0)), "our own session is not touched"


def test_the_watchdog_keeps_only_sessions_that_have_not_ended() -> None:
    assert watch(["+10\n", "+11\n", "-10\n", "+12\n"]) == {11, 12}


def test_the_watchdog_kills_the_sessions_of_a_killed_runner(tree: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    (tmp_path / "left" / "by-an-engine").mkdir(parents=True)
    command = [sys.executable, "-m", "marlaas.local.watchdog", str(tmp_path / "left")]
    assert subprocess.run(command, input=f"+{tree.pid}\n".encode(), check=False).returncode == 0
    tree.wait()
    assert session_members(tree.pid) == []
    assert not (tmp_path / "left").exists()


async def test_a_runner_whose_watchdog_was_killed_cleans_up_itself(tree: "subprocess.Popen[bytes]") -> None:
    async with watchdog() as guard:
        guard.add(tree.pid)
        (guard.temporary / "by-an-engine").touch()
        guard._process.kill()
        await guard._process.wait()
        guard.add(12345678)  # the pipe has no reader any more
        guard.remove(12345678)
    await asyncio.to_thread(tree.wait)
    assert session_members(tree.pid) == []
    assert not guard.temporary.exists()


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TMPDIR as batch systems set it."""
    folder = tmp_path.joinpath(*["scratch-of-a-project-on-a-parallel-file-system"] * 3)
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def entries(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_the_folder_has_a_path_for_sockets_also_in_a_long_tmpdir_and_goes(long_folder: Path) -> None:
    async with watchdog() as guard:
        assert entries(long_folder) == [guard.temporary.name]
        address = guard.temporary / ("x" * 37)  # as long as vLLM's names
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
    assert entries(long_folder) == []
    assert not guard.temporary.is_symlink()


async def test_a_tmpdir_that_is_too_long_is_refused_with_the_numbers(long_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(processes, "SHORT_FOLDERS", (Path("/nowhere"),))
    with pytest.raises(InvalidInput, match=r"TMPDIR is .* its path is too long .* .at most 64.* set TMPDIR"):
        async with watchdog():
            pass
    assert entries(long_folder) == []
