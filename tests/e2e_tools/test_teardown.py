"""A cluster that was brought up for a command is taken down however the command ends; one that was up already is left alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.tables import rows

_HARNESS = """
import sys
from pathlib import Path
from marlaas_e2e import __main__ as harness
from marlaas_e2e.node import cluster
from marlaas_e2e.node.cluster import CannotRun, Running

diary, story, *words = sys.argv[1:]
def wrote(word):
    with open(diary, "a") as file:
        file.write(word + "\\n")
def up(layout, *, tied=False):
    wrote("up tied" if tied else "up")
    if story == "cannot":
        raise CannotRun("no room")
    return Running(1, 1)
cluster.up = up
cluster.down = lambda layout: wrote("down")
cluster.running = lambda layout: Running(1, 1) if story == "there already" else None
cluster.inside = lambda found, command: list(command)
sys.exit(harness.main(["--root", str(Path(diary).parent), "run", *words]))
"""


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
        assert self.process.stdout is not None
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
