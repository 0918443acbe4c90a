"""Figures of processes that the fork server reads from /proc, and the name of an episode's folder."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from marlaas_worker.sandbox import forkserver, kernel

HOLDS = """
import mmap, sys
held = b"x" * (32 << 20)
shared = mmap.mmap(-1, 16 << 20)
shared[:] = bytes(len(shared))
print("ready", flush=True)
sys.stdin.read()
"""
FORKS_IN_A_THREAD = """
import subprocess, sys, threading
thread = threading.Thread(target=lambda: (subprocess.Popen(["sleep", "60"]), print("ready", flush=True), sys.stdin.read()))
thread.start()
"""


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process that runs the program of the parameter, once it has printed a line."""
    command = [sys.executable, "-c", request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        kernel.kill_all(process.pid)


@pytest.mark.parametrize("started", [HOLDS], indirect=True)
def test_held_memory_counts_anonymous_and_shared_pages_and_resident_memory_is_an_upper_bound(started: int) -> None:
    assert 48 << 20 <= kernel.held_bytes(started) <= kernel.resident_bytes(started)


@pytest.mark.parametrize("started", [FORKS_IN_A_THREAD], indirect=True)
def test_a_child_that_another_thread_forked_is_found(started: int) -> None:
    assert len(kernel.descendants(started)) == 1


def test_a_process_that_has_exited_has_no_memory_and_no_children() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert (kernel.held_bytes(process.pid), kernel.resident_bytes(process.pid), kernel.children(process.pid)) == (
        0,
        0,
        [],
    )


@pytest.mark.parametrize("started", [HOLDS], indirect=True)
def test_the_cpu_time_of_a_process_grows_only_while_it_runs(started: int) -> None:
    own = kernel.cpu_time_ns(os.getpid())
    sum(range(10_000))
    assert kernel.cpu_time_ns(os.getpid()) > own
    while psutil.Process(started).status() != psutil.STATUS_SLEEPING:  # it has not begun to wait
        time.sleep(0.01)
    waiting = kernel.cpu_time_ns(started)
    assert kernel.cpu_time_ns(started) == waiting > 0


def test_a_process_that_shares_a_cpu_waits_for_it() -> None:
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


def test_an_episodes_folder_gets_another_name_if_an_earlier_episode_has_taken_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "episode-2").symlink_to("/")
    folders = [Path(forkserver.new_folder(number)) for number in (1, 2)]
    assert folders[0] == tmp_path / "episode-1"
    assert folders[1].parent == tmp_path
    assert not folders[1].is_symlink()
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
