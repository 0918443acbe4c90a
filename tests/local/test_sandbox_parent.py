"""The common parent of a run's sandboxes: what a forked role is given, how its end is known, and what ends with what."""

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import psutil
import pytest

from marlaas.local.credentials import OneForAll
from marlaas.local.folder import hold
from marlaas.local.plan import ProcessSpec
from marlaas.local.processes import ROLE_COMMAND, Launcher, Watchdog, ask_to_end
from marlaas.local.sandbox_parent import ParentLost, SandboxParent, sandbox_parent
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import JobDocument

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


class Sessions:
    """Sessions that end with the runner."""

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def add(self, session: int) -> None:
        self.registered.add(session)

    def remove(self, session: int) -> None:
        self.registered.remove(session)


@contextlib.asynccontextmanager
async def started(
    log: Path, command: tuple[str, ...] = COMMAND, sessions: Sessions | None = None, **variables: str
) -> AsyncIterator[SandboxParent]:
    sessions = sessions or Sessions()
    with log.open("ab") as file:
        async with sandbox_parent(command, file, {**os.environ, **variables}, sessions) as parent:
            assert sessions.registered == {parent.pid}
            yield parent
    assert sessions.registered == set()


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
            ended = await parent.fork(["end", "2"], log, ())
            crashed = await parent.fork(["crash"], log, ())
            waiting = await parent.fork(["wait"], log, ())
        assert (await ended.wait(), await crashed.wait()) == (2, 1)
        ask_to_end(waiting)
        assert await waiting.wait() == -signal.SIGTERM
        ask_to_end(waiting)  # its number may be another process's by now: no signal is sent
    assert "RuntimeError: scripted crash" in (tmp_path / "role.log").read_text()


async def test_roles_end_with_a_parent_that_is_killed_and_no_more_are_forked(tmp_path: Path) -> None:
    async with started(tmp_path / "parent.log") as parent:
        readable, writable = os.pipe()
        with os.fdopen(writable, "wb") as log:
            role = await parent.fork(["wait"], log, ())
            assert await asyncio.to_thread(os.read, readable, 64) == b"waiting\n"
            gone = os.pidfd_open(role.pid)
            os.kill(parent.pid, signal.SIGKILL)
            assert await role.wait() == -signal.SIGKILL
            assert select.select([gone], [], [], 20.0)[0]
            os.close(gone)
            with pytest.raises(ParentLost):
                await parent.fork(["wait"], log, ())
    os.close(readable)


async def test_roles_end_with_the_context(tmp_path: Path) -> None:
    async with started(tmp_path / "parent.log") as parent:
        readable, writable = os.pipe()
        with os.fdopen(writable, "wb") as log:
            role = await parent.fork(["wait"], log, ())
        assert await asyncio.to_thread(os.read, readable, 64) == b"waiting\n"
        gone = os.pidfd_open(role.pid)
    os.close(readable)
    assert select.select([gone], [], [], 20.0)[0]
    os.close(gone)


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


class LostParent:
    """A common parent that has exited."""

    async def fork(self, *_: object) -> None:
        raise ParentLost("it has exited")


async def test_a_sandbox_starts_as_a_process_of_its_own_once_the_parent_is_lost(tmp_path: Path) -> None:
    spec = job_spec(
        RLJobSpec.model_validate(
            {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 1}}
        )
    )
    job = JobDocument(namespace="team-a", job="job", uid="u1", pool="tiny", tenant="team-a", spec=spec)
    with hold(tmp_path / "out") as folder:
        guard = Watchdog(cast("asyncio.subprocess.Process", _NoProcess()), tmp_path)
        command = (sys.executable, "-c", "import sys; print(sys.argv[1])")
        launcher = Launcher(folder, "nats://none", OneForAll(None), guard, {}, {job.ref.key: job}, command=command)
        async with launcher.with_parent() as same:
            assert same is launcher  # a role command of a test has no common parent
        process = await replace(launcher, parent=cast("SandboxParent", LostParent())).start(
            ProcessSpec("sandbox", "sandbox-0", job=job.ref.key)
        )
        assert await process.wait() == 0
        lines = launcher.log(ProcessSpec("sandbox", "sandbox-0", job=job.ref.key)).read_text().splitlines()
    assert lines[1] == "a process of its own, not a fork of the sandboxes' common parent: it has exited"
    assert lines[2] == "sandbox"


class _NoProcess:
    stdin = None
