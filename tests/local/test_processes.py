"""How roles are started and ended: credentials, the common parent of sandboxes, the watchdog, and signals."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.harness import job_document
from tests.killing import assert_gone
from tests.tables import data

from marlaas.local import processes
from marlaas.local.credentials import LocalIssuer, OneForAll
from marlaas.local.folder import hold
from marlaas.local.interrupts import Interrupts
from marlaas.local.plan import MAX_NEVER_READY, MAX_START_S, ProcessSpec
from marlaas.local.processes import ROLE_COMMAND, Launcher, Watchdog, ask_to_end, own_variables, watchdog
from marlaas.local.sandbox_parent import ParentLost, sandbox_parent
from marlaas.local.supervisor import Supervisor
from marlaas.local.watchdog import kill_session, session_members, watch
from marlaas_api.bus_users import BusKeys
from marlaas_api.errors import InvalidInput

pytestmark = pytest.mark.processes

FIRST, SECOND, THIRD, FOURTH = (job_document(name) for name in ("first", "second", "third", "fourth"))
WAIT = (sys.executable, "-c", "import time; time.sleep(600)")


class NoProcess:
    stdin = None


@pytest.fixture
def folder(tmp_path):
    with hold(tmp_path / "out") as held:
        yield held


def launcher_of(folder, *command: str, credentials=None, modules=None):
    guard = Watchdog(NoProcess(), folder.root)
    jobs = {job.ref.key: job for job in (FIRST, SECOND)}
    return Launcher(folder, "nats://none", credentials or OneForAll(None), guard, {}, jobs, modules or {}, command)


def sandbox(job, number=0):
    return ProcessSpec("sandbox", f"sandbox-{number}", job=job.ref.key)


OWN = {"environment": {"name": "game:play"}}


def test_each_sandbox_is_told_the_folder_of_its_own_jobs_manifest(folder):
    first, second = (job_document(name, spec=OWN) for name in ("first", "added"))
    launcher = launcher_of(folder, modules={first.ref.key: Path("/a")})
    launcher.add(first, Path("/of a change of it"))
    launcher.add(second, Path("/b"))
    launcher.add(THIRD, Path("/of a builtin environment"))
    told = {job.ref.name: launcher._modules(sandbox(job)) for job in (first, second, THIRD)}
    assert told == {"first": ["--modules", "/a"], "added": ["--modules", "/b"], "third": []}
    launcher.add(job_document("first", uid="of the next job of this name", spec=OWN), Path("/c"))
    assert launcher._modules(sandbox(first)) == ["--modules", "/c"]


def test_variables_of_the_shell_for_other_programs_do_not_reach_the_roles():
    dropped, kept = data(__file__, "variables")
    assert list(own_variables(dict.fromkeys(f"{dropped} {kept}".split(), "x"))) == kept.split()


class LostParent:
    async def fork(self, *_: object):
        raise ParentLost("it has exited")


async def test_a_sandbox_starts_as_a_process_of_its_own_once_the_parent_is_lost(folder):
    launcher = launcher_of(folder, sys.executable, "-c", "import sys; print(sys.argv[1])")
    async with launcher.with_parent() as same:
        assert same is launcher  # a role command of a test has no common parent
    process = await replace(launcher, parent=LostParent()).start(sandbox(FIRST))
    assert await process.wait() == 0
    lines = launcher.log(sandbox(FIRST)).read_text().splitlines()
    assert lines[1:] == ["a process of its own, not a fork of the sandboxes' common parent: it has exited", "sandbox"]


def open_credentials():
    files = [file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return sum("marlaas-credentials" in str(file) for file in files)


async def test_credentials_of_a_job_are_closed_once_all_its_sandboxes_have_ended(folder):
    first, again, second = sandbox(FIRST), sandbox(FIRST, 1), sandbox(SECOND)
    with closing(LocalIssuer(BusKeys.make())) as issuer:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            supervisor = Supervisor(launcher_of(folder, *WAIT, credentials=issuer), tasks)
            kept = []
            for wanted in ([first, again, second], [again, second], [second], []):
                supervisor.changed.clear()
                await supervisor.reconcile(wanted, ())
                if len(wanted) < 3:
                    await supervisor.changed.wait()
                    await supervisor.reconcile(wanted, ())
                kept.append(open_credentials())
    assert kept == [2, 2, 1, 0]


async def test_a_worker_that_does_not_become_ready_is_ended_and_given_up_with_the_limit(folder):
    engine, now = ProcessSpec("rollout", "rollout-0", pool="tiny"), [0.0]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        supervisor = Supervisor(launcher_of(folder, *WAIT), tasks, lambda: now[0])
        for _ in range(MAX_NEVER_READY):
            assert supervisor.given_up() == ()
            supervisor.changed.clear()
            await supervisor.reconcile([engine], ())
            now[0] += MAX_START_S
            await supervisor.reconcile([engine], ())
            await supervisor.changed.wait()
            now[0] += MAX_START_S
        ((_, why),) = supervisor.given_up()
    assert "rollout-0 (tiny) exited: killed, because it was not ready after 30 m 00 s" in why


SCRIPTED = data(__file__, "scripted")
COMMAND = (sys.executable, "-c", SCRIPTED)


@contextlib.asynccontextmanager
async def started(log, command=COMMAND, **variables: str):
    sessions = set[int]()
    with log.open("ab") as file:
        async with sandbox_parent(command, file, {**os.environ, **variables}, sessions) as parent:
            assert sessions == {parent.pid}
            yield parent
    assert sessions == set()


async def test_a_forked_role_has_its_own_credentials_log_session_and_exit_code(tmp_path):
    creds = os.memfd_create("credentials")
    os.write(creds, b"secret")
    async with started(tmp_path / "parent.log") as parent:
        with (tmp_path / "role.log").open("ab") as log:
            role = await parent.fork(["tell", f"/dev/fd/{creds}"], log, (creds,))
        with (tmp_path / "files.log").open("ab") as log:
            another = await parent.fork(["files"], log, ())
        with (tmp_path / "ends.log").open("ab") as log:
            ends = [await parent.fork(words, log, ()) for words in (["end", "2"], ["crash"], ["wait"])]
        codes = [await one.wait() for one in (role, another, *ends[:2])]
        assert codes == [0, 0, 2, 1]
        ask_to_end(ends[2])
        assert await ends[2].wait() == -signal.SIGTERM
        ask_to_end(ends[2])  # its number may be another process's by now: no signal is sent
    os.close(creds)
    assert (tmp_path / "role.log").read_text() == "secret True True\n"
    files = (tmp_path / "files.log").read_text()  # of a role that was forked later, so also its parent's
    assert ("files.log" in files, "credentials" in files) == (True, False)
    assert "RuntimeError: scripted crash" in (tmp_path / "ends.log").read_text()


@contextlib.asynccontextmanager
async def waiting(parent):
    readable, writable = os.pipe()
    with os.fdopen(readable, "rb") as said, os.fdopen(writable, "wb") as log:
        role = await parent.fork(["wait"], log, ())
        assert await asyncio.to_thread(said.readline) == b"waiting\n"
        yield role, os.pidfd_open(role.pid)


async def test_roles_end_with_a_parent_that_is_killed_and_with_the_context(tmp_path):
    async with started(tmp_path / "parent.log") as parent, waiting(parent) as (role, gone):
        os.kill(parent.pid, signal.SIGKILL)
        assert await role.wait() == -signal.SIGKILL
        await asyncio.to_thread(assert_gone, gone)
        with (tmp_path / "role.log").open("ab") as log, pytest.raises(ParentLost):
            await parent.fork(["wait"], log, ())
    async with contextlib.AsyncExitStack() as stack:
        async with started(tmp_path / "parent.log") as parent:
            _, gone = await stack.enter_async_context(waiting(parent))
        await asyncio.to_thread(assert_gone, gone)


async def test_a_parent_with_a_second_thread_forks_nothing(tmp_path):
    async with started(tmp_path / "parent.log", THREADS="1") as parent:
        with (tmp_path / "role.log").open("ab") as log, pytest.raises(ParentLost):
            await parent.fork(["end", "0"], log, ())
    assert "more than one thread" in (tmp_path / "parent.log").read_text()


async def test_the_real_parent_forks_the_real_role(tmp_path):
    async with started(tmp_path / "parent.log", ROLE_COMMAND) as parent:
        with (tmp_path / "role.log").open("ab") as log:
            role = await parent.fork(["sandbox", "--name", "sandbox-0"], log, ())
        assert await role.wait() == 2
        assert psutil.Process(parent.pid).num_threads() == 1
    assert "the following arguments are required: --nats" in (tmp_path / "role.log").read_text()


@pytest.fixture
def tree():
    with subprocess.Popen(
        [sys.executable, "-c", data(__file__, "tree")], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout.readline() == b"up\n"
        yield process
        kill_session(process.pid)


@pytest.mark.parametrize("is_leader_killed", [False, True])
def test_a_session_ends_with_everything_in_it(tree, is_leader_killed):
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


def test_the_watchdog_kills_the_open_sessions_of_a_killed_runner_and_no_ended_ones(tree, tmp_path):
    (tmp_path / "left" / "by-an-engine").mkdir(parents=True)
    command = [sys.executable, "-m", "marlaas.local.watchdog", str(tmp_path / "left")]
    assert subprocess.run(command, input=f"+{tree.pid}\n".encode(), check=False).returncode == 0
    tree.wait()
    assert session_members(tree.pid) == []
    assert not (tmp_path / "left").exists()
    assert watch(["+10\n", "+11\n", "-10\n", "+12\n"]) == {11, 12}


async def test_a_runner_whose_watchdog_was_killed_cleans_up_itself(tree):
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
def long_folder(tmp_path, monkeypatch):
    """A TMPDIR as batch systems set it."""
    folder = tmp_path.joinpath(*["scratch-of-a-project-on-a-parallel-file-system"] * 3)
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def entries(folder):
    return [path.name for path in folder.iterdir()]


async def test_a_long_tmpdir_has_a_short_path_for_sockets_or_is_refused_with_the_numbers(long_folder, monkeypatch):
    async with watchdog() as guard:
        assert entries(long_folder) == [guard.temporary.name]
        address = guard.temporary / ("x" * 37)  # as long as vLLM's names
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
    assert entries(long_folder) == []
    assert not guard.temporary.is_symlink()
    monkeypatch.setattr(processes, "SHORT_FOLDERS", (Path("/nowhere"),))
    with pytest.raises(InvalidInput, match=r"TMPDIR is .* its path is too long .* .at most 64.* set TMPDIR"):
        async with watchdog():
            pass
    assert entries(long_folder) == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
async def test_a_signal_that_the_parent_ignores_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    interrupts = Interrupts()
    try:
        with interrupts.listening():
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(interrupts.first.wait(), 60)
            assert not interrupts.second.is_set()
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
