"""What a run does with tests that fail once: only those that start processes get a second chance, and only two of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
CONFTEST = Path(__file__).with_name("conftest_of_runs.txt").read_text(encoding="utf-8")


def outcome(folder: Path, tests: str) -> tuple[int, str]:
    """The exit status and the closing line of a run of these tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(tests)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "MARLAAS_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "."]
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()[-1]


def failing_once(*names: str, fixture: str = "process") -> str:
    return "\n".join(f"def test_{name}(first, {fixture}):\n    assert not first('{name}')\n" for name in names)


def test_a_test_of_processes_that_passes_alone_is_flaky_and_the_run_passes(tmp_path):
    status, line = outcome(tmp_path, failing_once("a", "b") + "def test_c():\n    pass\n")
    assert status == 0
    assert line.startswith("1 passed, 2 flaky")


@pytest.mark.parametrize(
    ("tests", "failed"),
    [
        (failing_once("a", "b", "c"), 3),
        (failing_once("a", fixture="tmp_path"), 1),
        ("def test_a(process):\n    assert False\n", 1),
        (failing_once("a") + failing_once("b", fixture="tmp_path"), 2),
    ],
    ids=["three", "no process", "fails alone", "another has no process"],
)
def test_every_other_failure_fails_the_run(tmp_path, tests, failed):
    status, line = outcome(tmp_path, tests)
    assert status == 1
    assert line.startswith(f"{failed} failed")


def test_tests_that_share_a_broken_fixture_count_as_one(tmp_path):
    tests = "\n".join(f"def test_{number}(broken_once):\n    pass\n" for number in range(4))
    status, line = outcome(tmp_path, tests)
    assert status == 0
    assert line.startswith("4 flaky")
