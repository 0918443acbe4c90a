"""This machine: whether a node can run here, its processes and containers; a cluster that was brought up is taken down however a command ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.tables import data, rows

from marlaas_e2e.__main__ import UNABLE, main
from marlaas_e2e.handle import ClusterHandle
from marlaas_e2e.node import host

_STARTS_ONE = data(__file__, "starts_one")
_HARNESS = data(__file__, "harness")


def test_without_root_it_says_so_and_somebody_elses_cluster_needs_no_rights_here(monkeypatch, capsys):
    monkeypatch.delenv("E2E_CONTEXT", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["able"]) == UNABLE
    assert "root" in capsys.readouterr().out
    monkeypatch.setenv("E2E_CONTEXT", "kind-kind")
    assert main(["able"]) == 0


def test_a_kill_that_hits_nothing_is_an_error(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    monkeypatch.setattr(ClusterHandle, "container_pid", lambda *_: ended.pid)
    with pytest.raises(LookupError, match="team-a/pod: container ended by itself"):
        ClusterHandle(Path("kubeconfig"), "ours").kill_container("team-a", "pod", "container")


@pytest.mark.slow
def test_nothing_survives_a_test_run_that_is_killed():
    run = subprocess.Popen([sys.executable, "-c", _STARTS_ONE], stdout=subprocess.PIPE, text=True)
    etcd, apiserver, folder = run.stdout.readline().split()
    run.kill()
    run.communicate()
    for pid in (etcd, apiserver):
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], timeout=30, check=True)  # waits for its end
        assert host.birth_of(int(pid)) is None
    for left in sorted(Path(folder).rglob("*"), reverse=True):
        left.rmdir() if left.is_dir() else left.unlink()
    Path(folder).rmdir()


@dataclass
class Harness:
    """`python -m marlaas_e2e run`, of which bringing up and taking down are written into a diary instead."""

    process: subprocess.Popen[str]
    file: Path

    def code(self) -> int:
        return self.process.wait(60)

    def diary(self) -> list[str]:
        return self.file.read_text().splitlines() if self.file.exists() else []

    def says(self) -> str:
        return self.process.stdout.readline()


def _as_in_a_terminal() -> None:
    """Tests that run in the background of a shell have Ctrl-C ignored, and their children would."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def harness(folder: Path, story: str, *words: str, context: str = "") -> Iterator[Harness]:
    """Started; context: somebody else's cluster."""
    environment = {name: value for name, value in os.environ.items() if name != "E2E_CONTEXT"}
    environment |= {"E2E_CONTEXT": context} if context else {}
    command = [sys.executable, "-c", _HARNESS, str(folder / "diary"), story, *words]
    options = {"stdout": subprocess.PIPE, "text": True, "preexec_fn": _as_in_a_terminal}
    with subprocess.Popen(command, env=environment, **options) as process:
        try:
            yield Harness(process, folder / "diary")
        finally:
            process.kill()


@pytest.mark.parametrize(("story", "context", "code", "diary"), rows(__file__, "teardown"))
def test_what_was_brought_up_is_taken_down_whatever_the_command_ends_with(tmp_path, story, context, code, diary):
    with harness(tmp_path, story, "sh", "-c", f"exit {code}", context=context) as run:
        assert run.code() == code
        assert run.diary() == diary


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_it_is_taken_down_when_somebody_ends_the_run(tmp_path, how):
    program = "import time; print('running', flush=True); time.sleep(600)"
    with harness(tmp_path, "fresh", sys.executable, "-c", program) as run:
        assert run.says() == "running\n"
        run.process.send_signal(how)
        assert run.code() != 0
        assert run.diary() == ["up tied", "down"]
        assert run.says() == "", "the command has ended too: nobody holds its output open"
