"""A server as a child process: how it ended, and that it has not."""

import sys
from pathlib import Path

import pytest

from marlaas_e2e.processes import Daemon, NotReady


def daemon(folder: Path, program: str) -> Daemon:
    return Daemon("server", [sys.executable, "-c", program], folder / "log")


def test_its_exit_code_is_told(tmp_path: Path) -> None:
    server = daemon(tmp_path, "raise SystemExit(3)")
    server.start()
    assert server.wait(60) == 3


def test_one_that_was_never_started_or_still_runs_has_no_exit_code(tmp_path: Path) -> None:
    server = daemon(tmp_path, "import time; time.sleep(3600)")
    with pytest.raises(NotReady, match="server was never started"):
        server.wait(60)
    server.start()
    with pytest.raises(NotReady, match="server still runs after 0 s"):
        server.wait(0.1)
    server.kill()
