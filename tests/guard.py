"""The guard against tests that fail by chance: a test that starts processes and fails is run once more, alone.

If it passes then, it is printed as flaky and the run passes. Three flaky tests fail the run. Nothing else is retried:
a test that starts no process has no excuse. Tests that fail in the set-up of what they share count as one.
`tests/FLAKY.md` lists the flaky tests that are not mended yet.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

PROPERTY = "starts_processes"
MARKERS = ("engine", "api_server", "processes")
MAX_FLAKY = 2
ALONE = "MARLAAS_TESTS_ALONE"
"""The environment variable that tells the second run that it is one: nothing is run a third time."""


def register(config: pytest.Config) -> None:
    """Add the guard to a run; for `pytest_configure` of a conftest."""
    config.pluginmanager.register(ProcessWatch(), "process-watch")
    if not hasattr(config, "workerinput") and ALONE not in os.environ:
        config.pluginmanager.register(Guard(), "guard")


def may_be_flaky(failures: Sequence[pytest.TestReport]) -> list[list[str]]:
    """Group the failures of a run for second runs; an empty list if the run fails whatever they give.

    A failure is a group of its own. Errors in the set-up are one group for each folder, since they have one cause: a fixture that
    the tests share.
    """
    if not failures or any((PROPERTY, True) not in report.user_properties for report in failures):
        return []
    groups: dict[str, list[str]] = {}
    for report in failures:
        folder = report.nodeid.split("::")[0].rpartition("/")[0]
        of_group = groups.setdefault(report.nodeid if report.when == "call" else folder, [])
        if report.nodeid not in of_group:
            of_group.append(report.nodeid)
    return [*groups.values()] if len(groups) <= MAX_FLAKY else []


class ProcessWatch:
    """Marks the reports of tests that start processes, themselves or by a fixture; runs where the tests run."""

    def __init__(self) -> None:
        self._fixtures: set[str] = set()
        self._tests: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
        before = _children()
        try:
            return (yield)
        finally:
            if _children() != before:
                self._fixtures.add(fixturedef.argname)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._tests.discard(item.nodeid)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        before = _children()
        try:
            return (yield)
        finally:
            if _children() != before:
                self._tests.add(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        by_marker = any(item.get_closest_marker(name) for name in MARKERS)
        by_fixture = not self._fixtures.isdisjoint(getattr(item, "fixturenames", ()))
        if by_marker or by_fixture or item.nodeid in self._tests:
            report.user_properties.append((PROPERTY, True))
        return report


def _children() -> tuple[set[str], int]:
    """The running children, and a number that grows with each child that has been reaped."""
    running = {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
    return running, resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


@dataclass(eq=False)
class Guard:
    """Runs failed tests once more and decides whether the run passes; runs in pytest's main process."""

    failures: list[pytest.TestReport] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    """Their ids."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.append(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Run the failed tests again, after the session's fixtures are torn down and before the summary is printed."""
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        for group in may_be_flaky(self.failures):
            if not self._passes_alone(session.config, group):
                return
            self.flaky += group
        if self.flaky:
            self._call_flaky(session)

    @staticmethod
    def _passes_alone(config: pytest.Config, tests: list[str]) -> bool:
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        assert isinstance(terminal, TerminalReporter)
        terminal.write_line("")
        terminal.write_line(f"failed, and run once more alone: {' '.join(tests)}", yellow=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests]
        again = subprocess.run(command, cwd=config.rootpath, env=os.environ | {ALONE: "1"}, check=False)
        return again.returncode == 0

    def _call_flaky(self, session: pytest.Session) -> None:
        """Count the failures as flaky instead of failed, in the summary and in the exit status."""
        stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
        stats["flaky"] = [*stats.pop("failed", ()), *stats.pop("error", ())]
        session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        for report in terminalreporter.stats.get("flaky", ()):
            terminalreporter.section(f"flaky: {report.nodeid}", yellow=True)
            terminalreporter.write_line(report.longreprtext)
        for test in self.flaky:
            terminalreporter.write_line(
                f"FLAKY {test}: passed alone; mend it, or add it to tests/FLAKY.md", yellow=True
            )
