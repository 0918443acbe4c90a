"""What a sandbox asks of Linux: what its children cannot read, who may look, who outlives whom, and figures of processes."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from tests.killing import assert_gone
from tests.tables import data

from marlaas_worker.sandbox import forkserver, kernel
from marlaas_worker.sandbox.seclusion import clean_variables, secluded
from marlaas_worker.sandbox.server import BrokenEnvironment
from marlaas_worker.sandbox.server_start import ChildrenConfig, start_server

PROGRAM = data(__file__, "program")


@pytest.fixture
def secret(tmp_path):
    """A Secret as it is mounted: a link to a link to what comes and goes."""
    folder = tmp_path / "bus"
    (folder / "..2026").mkdir(parents=True)
    (folder / "..2026" / "bus.creds").write_text("seed")
    (folder / "..data").symlink_to("..2026")
    (folder / "bus.creds").symlink_to("..data/bus.creds")
    (tmp_path / "link").symlink_to(folder / "bus.creds")
    (tmp_path / "beside").write_text("beside")
    (tmp_path / "work").mkdir()
    return folder / "bus.creds"


def test_the_folder_of_a_mounted_secret_the_file_of_a_person_and_nothing_of_a_descriptor(secret, tmp_path):
    assert secluded(secret) == tmp_path / "bus"
    assert secluded(tmp_path / "beside") == tmp_path / "beside"
    assert secluded(Path("/dev/fd/7")) is None


@pytest.mark.parametrize("mounted", [True, False])
def test_children_read_all_but_the_credential_and_look_into_no_process_outside(secret, tmp_path, mounted):
    if not mounted:
        secret.unlink()
        secret.write_text("seed")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(secluded(secret))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel has no Landlock of version 2 or newer")
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[False, False, True, True, True]", "hidden", "x"]


SPY = data(__file__, "spy")
SUPERVISOR = data(__file__, "supervisor")


@pytest.mark.processes
def test_other_processes_of_the_user_cannot_look_into_the_supervisor():
    done = subprocess.run([sys.executable, "-c", SPY], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1"]


@pytest.mark.processes
def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path):
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path / "scratch")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as supervisor:
        handles = [os.pidfd_open(int(pid)) for pid in supervisor.stdout.readline().split()]
        supervisor.send_signal(signal.SIGKILL)
    assert len(handles) == 3, "the fork server, the child and its own child"
    assert_gone(*handles)


@pytest.mark.processes
async def test_what_loading_an_environment_has_started_is_killed_with_its_fork_server(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    scratch = tmp_path / "scratch"
    config = ChildrenConfig("rogues:EndsWithAProcess", {}, 1 << 29, 30.0, scratch, clean_variables(os.environ))
    with pytest.raises(BrokenEnvironment, match="exited while it loaded"):
        await start_server(config)
    with contextlib.suppress(ProcessLookupError):
        assert_gone(os.pidfd_open(int((scratch / "started").read_text())))


HOLDS = data(__file__, "holds")
FORKS_IN_A_THREAD = data(__file__, "forks_in_a_thread")


@pytest.fixture
def started(request):
    command = [sys.executable, "-c", request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        kernel.kill_all(process.pid)


@pytest.mark.parametrize("started", [HOLDS], indirect=True)
def test_held_memory_counts_shared_pages_and_cpu_time_grows_only_while_a_process_runs(started):
    assert 48 << 20 <= kernel.held_bytes(started) <= kernel.resident_bytes(started), "resident memory is an upper bound"
    own = kernel.cpu_time_ns(os.getpid())
    sum(range(10_000))
    assert kernel.cpu_time_ns(os.getpid()) > own
    while psutil.Process(started).status() != psutil.STATUS_SLEEPING:  # it has not begun to wait
        time.sleep(0.01)
    waiting = kernel.cpu_time_ns(started)
    assert kernel.cpu_time_ns(started) == waiting > 0


@pytest.mark.parametrize("started", [FORKS_IN_A_THREAD], indirect=True)
def test_a_child_that_another_thread_forked_is_found(started):
    assert len(kernel.descendants(started)) == 1


def test_a_process_that_has_exited_has_no_memory_and_no_children():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    asked = (kernel.held_bytes, kernel.resident_bytes, kernel.children)
    assert [ask(process.pid) for ask in asked] == [0, 0, []]


def test_a_process_that_shares_a_cpu_waits_for_it():
    cpu = min(os.sched_getaffinity(0))
    spin = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"]
    both = [subprocess.Popen(spin) for _ in range(2)]
    try:
        while not all(kernel.cpu_wait_ns(one.pid) > 20_000_000 for one in both):
            time.sleep(0.05)
    finally:
        for one in both:
            one.kill()
            one.wait()
    assert kernel.cpu_wait_ns(both[0].pid) == 0, "it has ended"


def test_an_episodes_folder_gets_another_name_if_an_earlier_episode_has_taken_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "episode-2").symlink_to("/")
    folders = [Path(forkserver.new_folder(number)) for number in (1, 2)]
    assert folders[0] == tmp_path / "episode-1"
    assert folders[1].parent == tmp_path
    assert not folders[1].is_symlink()
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
