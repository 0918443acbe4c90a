"""The common parent of a run's sandboxes: what a forked role is given, how its end is known, and what ends with what."""

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from marlaas.local.processes import ROLE_COMMAND, ask_to_end
from marlaas.local.sandbox_parent import ForkedProcess, ParentLost, SandboxParent, sandbox_parent

pytestmark = pytest.mark.processes

SCRIPTED = """
import os, signal, sys, threading, time
from pathlib import Path
from marlaas_worker.sandbox import parent

def role(arguments):
    match arguments:
        case ["tell", path]:
            print(Path(path).read_text(), os.getsid(0) == os.getpid(), os.environ["MARLAAS_PARENT_PID"] == str(os.getppid()))
        case ["files"]:
            print(*(file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()))
        case ["end", code]:
            return int(code)
        case ["crash"]:
            raise RuntimeError("scripted crash")
        case ["wait"]:
            from marlaas_worker.__main__ import _die_with_parent
            _die_with_parent()
            os.write(1, b"waiting\\n")
            time.sleep(600)
    return 0

if "THREADS" in os.environ:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
sys.exit(parent.serve(int(sys.argv[-1]), role))
"""
COMMAND = (sys.executable, "-c", SCRIPTED)


@contextlib.asynccontextmanager
async def started(log: Path, command: tuple[str, ...] = COMMAND, **variables: str) -> AsyncIterator[SandboxParent]:
    """A common parent; its session is registered while it runs."""
    sessions = set[int]()
    with log.open("ab") as file:
        async with sandbox_parent(command, file, {**os.environ, **variables}, sessions) as parent:
            assert sessions == {parent.pid}
            yield parent
    assert sessions == set()


async def test_a_forked_role_has_its_credentials_its_log_and_a_session_of_its_own(tmp_path: Path) -> None:
    creds = os.memfd_create("credentials")
    os.write(creds, b"secret")
    async with started(tmp_path / "parent.log") as parent:
        with (tmp_path / "role.log").open("ab") as log:
            role = await parent.fork(["tell", f"/dev/fd/{creds}"], log, (creds,))
        with (tmp_path / "files.log").open("ab") as log:
            another = await parent.fork(["files"], log, ())
        assert (await role.wait(), await another.wait()) == (0, 0)
    os.close(creds)
    assert (tmp_path / "role.log").read_text() == "secret True True\n"
    files = (tmp_path / "files.log").read_text()  # of a role that was forked later, so also its parent's
    assert "files.log" in files
    assert "credentials" not in files


async def test_exit_codes_and_signals_are_those_of_the_role(tmp_path: Path) -> None:
    async with started(tmp_path / "parent.log") as parent:
        with (tmp_path / "role.log").open("ab") as log:
            ended, crashed, role = [await parent.fork(words, log, ()) for words in (["end", "2"], ["crash"], ["wait"])]
        assert (await ended.wait(), await crashed.wait()) == (2, 1)
        ask_to_end(role)
        assert await role.wait() == -signal.SIGTERM
        ask_to_end(role)  # its number may be another process's by now: no signal is sent
    assert "RuntimeError: scripted crash" in (tmp_path / "role.log").read_text()


@contextlib.asynccontextmanager
async def waiting(parent: SandboxParent) -> AsyncIterator[tuple[ForkedProcess, int]]:
    """A forked role that waits, and a descriptor that tells its end."""
    readable, writable = os.pipe()
    with os.fdopen(readable, "rb") as said, os.fdopen(writable, "wb") as log:
        role = await parent.fork(["wait"], log, ())
        assert await asyncio.to_thread(said.readline) == b"waiting\n"
        gone = os.pidfd_open(role.pid)
        yield role, gone
        os.close(gone)


async def test_roles_end_with_a_parent_that_is_killed_and_no_more_are_forked(tmp_path: Path) -> None:
    async with started(tmp_path / "parent.log") as parent, waiting(parent) as (role, gone):
        os.kill(parent.pid, signal.SIGKILL)
        assert await role.wait() == -signal.SIGKILL
        await asyncio.to_thread(select.select, [gone], [], [])
        with (tmp_path / "role.log").open("ab") as log, pytest.raises(ParentLost):
            await parent.fork(["wait"], log, ())


async def test_roles_end_with_the_context(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with started(tmp_path / "parent.log") as parent:
            _, gone = await stack.enter_async_context(waiting(parent))
        await asyncio.to_thread(select.select, [gone], [], [])


async def test_a_parent_with_a_second_thread_forks_nothing(tmp_path: Path) -> None:
    async with started(tmp_path / "parent.log", THREADS="1") as parent:
        with (tmp_path / "role.log").open("ab") as log, pytest.raises(ParentLost):
            await parent.fork(["end", "0"], log, ())
    assert "more than one thread" in (tmp_path / "parent.log").read_text()


async def test_the_real_parent_forks_the_real_role(tmp_path: Path) -> None:
    async with started(tmp_path / "parent.log", ROLE_COMMAND) as parent:
        with (tmp_path / "role.log").open("ab") as log:
            role = await parent.fork(["sandbox", "--name", "sandbox-0"], log, ())
        assert await role.wait() == 2
        assert psutil.Process(parent.pid).num_threads() == 1
    assert "the following arguments are required: --nats" in (tmp_path / "role.log").read_text()
