"""Which kept runs count, and how a run is stopped by its driver."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from bench import multitenant_runs as runs
from bench.multitenant_workload import MODES, Workload
from bench.sources import Sources

WORKLOAD, MODE = Workload(2, 0.0, 1), next(one for one in MODES if one.letter == "D")


@dataclass(slots=True)
class After:
    """Stops a run at the second look."""

    looks: int = 0

    def settings(self) -> Mapping[str, Any]:
        return {"stops": "at the second look"}

    def look(self, out: Path) -> bool:
        self.looks += 1
        return self.looks > 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commits of the runs that were made, instead of being run."""
    found: list[str] = []
    monkeypatch.setattr(runs, "_run", lambda start, *_: found.append(runs.sources(start.tree).commit))
    return found


def test_a_kept_run_counts_for_its_manifests_and_sources_only(tmp_path, monkeypatch, made, capsys):
    setting = runs.RunSetting(tmp_path)
    state = Sources("one", "1")
    monkeypatch.setattr(runs, "sources", lambda tree: state)
    folder = runs.run(WORKLOAD, MODE, setting)
    assert runs.run(WORKLOAD, MODE, setting) == folder
    assert made == ["one"]
    assert "kept run of commit one" in capsys.readouterr().out
    state = Sources("two", "2")
    assert runs.run(WORKLOAD, MODE, replace(setting, reuse=True)) == folder
    assert made == ["one"]
    assert runs.run(WORKLOAD, MODE, setting) == folder
    assert made == ["one", "two"]
    done = json.loads((folder / "done.json").read_text())
    assert done["commit"] == "two"
    assert done["began_at"] > 0.0


def test_rounds_slots_and_drivers_are_runs_of_their_own(tmp_path, monkeypatch, made):
    monkeypatch.setattr(runs, "sources", lambda tree: Sources("one", "1"))
    setting = runs.RunSetting(tmp_path)
    folders = [runs.run(WORKLOAD, MODE, setting, number) for number in (0, 1, 0)]
    assert folders[0] == folders[2] != folders[1]
    assert len(made) == 2
    runs.run(WORKLOAD, MODE, replace(setting, slots=3))
    runs.run(WORKLOAD, MODE, replace(setting, slots=3, changes=("monitored",)))
    runs.run(WORKLOAD, MODE, replace(setting, slots=3, changes=("monitored",)), driver=After())
    assert len(made) == 5


def test_a_run_that_failed_is_not_kept(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("ended with code 1")

    monkeypatch.setattr(runs, "_run", fail)
    with pytest.raises(RuntimeError, match="code 1"):
        runs.run(WORKLOAD, MODE, runs.RunSetting(tmp_path))
    assert not list(tmp_path.rglob("done.json"))


@pytest.mark.parametrize("is_driven", [True, False])
def test_a_driver_stops_a_run(tmp_path, monkeypatch, is_driven: bool):
    monkeypatch.setattr(runs, "_POLL_S", 0.0)
    script = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        driver = After() if is_driven else None
        if not is_driven:
            process.stdin.close()
        assert runs._wait(process, driver, tmp_path) is is_driven
        assert (process.returncode == 0) is not is_driven
