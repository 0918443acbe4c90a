"""Starts and ends of roles: credentials, the process of all sandboxes, the watchdog, and signals."""

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
from marlaas.local.processes import ROLE_COMMAND, Launcher, Watchdog, ask_to_end, kill, own_variables, watchdog
from marlaas.local.sandbox_host import HostCommand, sandbox_host
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
async def started(folder, command=COMMAND):
    sessions = set[int]()
    async with sandbox_host(HostCommand(command, os.environ, folder / "host.log"), sessions) as host:
        assert host.pid is None, "it is started for the first sandbox"
        yield host
        assert sessions == ({host.pid} if host.pid else set())
    assert sessions == set()


@contextlib.asynccontextmanager
async def said_by(host, *words: str):
    """Start a sandbox, and wait until it has written its first line."""
    readable, writable = os.pipe()
    with os.fdopen(readable, "rb") as said:
        with os.fdopen(writable, "wb") as log:
            sandbox = await host.start(words, log, ())
        assert await asyncio.to_thread(said.readline)
        yield sandbox


async def test_each_sandbox_of_the_one_process_has_its_own_credentials_log_and_exit_code(tmp_path):
    creds = os.memfd_create("credentials")
    os.write(creds, b"secret")
    async with asyncio.timeout(60), started(tmp_path) as host, said_by(host, "drain") as waiting:
        ended = []
        for name, *words in (["told", "tell", f"/dev/fd/{creds}"], ["files"] * 2, ["end", "end", "2"], ["crash"] * 2):
            with (tmp_path / f"{name}.log").open("ab") as log:
                ended.append(await host.start(words, log, (creds,) if name == "told" else ()))
            await ended[-1].wait()
        assert [await one.wait() for one in ended] == [0, 0, 2, 1]
        async with said_by(host, "hangs") as killed:
            ask_to_end(killed)
            kill(killed)
            assert await killed.wait() == -signal.SIGKILL
        assert not waiting.ended.done(), "the end of others is not its end"
        ask_to_end(waiting)
        assert await waiting.wait() == 0
        ask_to_end(waiting)  # it has ended: nothing is sent
    os.close(creds)
    told = (tmp_path / "told.log").read_text()
    assert told.startswith("secret\n")
    assert told.count("memfd:credentials") == 1, (
        "it is open in this process, and a process that this one starts has none"
    )
    assert "memfd:credentials" not in (tmp_path / "files.log").read_text(), "it is closed at the sandbox's end"
    assert "scripted crash" in (tmp_path / "host.log").read_text()


async def test_sandboxes_end_with_their_process_and_the_next_start_begins_another(tmp_path):
    async with (
        asyncio.timeout(60),
        started(tmp_path) as host,
        said_by(host, "drain") as one,
        said_by(host, "hangs") as two,
    ):
        before = host.pid
        os.kill(before, signal.SIGKILL)
        assert [await one.wait(), await two.wait()] == [-signal.SIGKILL] * 2
        async with said_by(host, "drain") as again:
            assert host.pid not in (before, None)
            host.kill()
            assert await again.wait() == -signal.SIGKILL
        async with said_by(host, "drain") as last:
            gone = os.pidfd_open(host.pid)
    await asyncio.to_thread(assert_gone, gone)
    assert await last.wait() == 0, "its process has exited by itself"


async def test_a_job_comes_and_goes_beside_others_and_all_are_started_again_after_the_process_is_killed(folder):
    """By the launcher and the supervisor of a run. A role command of a test has no such process, unless it is given one."""
    launcher = launcher_of(folder, *COMMAND)
    async with launcher.with_host() as same:
        assert same is launcher
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks, started(folder.root) as host:
        supervisor = Supervisor(replace(launcher, host=host), tasks)
        both = [sandbox(FIRST), sandbox(SECOND)]
        await supervisor.reconcile(both, ())
        before = host.pid
        await supervisor.reconcile(both[1:], ())
        await supervisor.changed.wait()
        assert [str(state.spec) for state in supervisor.states()] == ["sandbox-0 (team-a/second)"]
        assert (supervisor.news(), host.pid) == ([], before)
        supervisor.changed.clear()
        os.kill(before, signal.SIGKILL)
        await supervisor.changed.wait()
        assert supervisor.news() == ["sandbox-0 (team-a/second) exited: killed by SIGKILL; it restarts"]
        await supervisor.reconcile([sandbox(FIRST)], ())
        assert host.pid not in (before, None)
        await supervisor.drain(0.0)
        assert host.pid is None


async def test_the_real_process_serves_the_real_role(tmp_path):
    async with asyncio.timeout(60), started(tmp_path, ROLE_COMMAND) as host:
        with (tmp_path / "role.log").open("ab") as log:
            role = await host.start(["sandbox", "--name", "sandbox-0"], log, ())
        assert await role.wait() == 2
        assert host.pid is not None
    assert "the following arguments are required: --nats" in (tmp_path / "host.log").read_text()


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
