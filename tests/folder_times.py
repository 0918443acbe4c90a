"""The seconds of the tests by folder, in the summary of a run."""

from collections import defaultdict

import pytest
from _pytest.terminal import TerminalReporter


def register(config: pytest.Config) -> None:
    """Add the table to a run; for `pytest_configure` of a conftest."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FolderTimes(), "folder-times")


class FolderTimes:
    """Sums the durations of set-ups, calls and tear-downs; with several processes the sum is over all of them."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._tests: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        folder = "/".join(report.nodeid.split("::")[0].split("/")[:2])
        self._seconds[folder] += report.duration
        self._tests[folder].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        if len(self._seconds) < 2:
            return
        terminalreporter.section("seconds and tests by folder")
        for folder, seconds in sorted(self._seconds.items(), key=lambda one: -one[1]):
            terminalreporter.write_line(f"{seconds:8.1f} s {len(self._tests[folder]):6} tests  {folder}")
        terminalreporter.write_line(f"{sum(self._seconds.values()):8.1f} s in all")
