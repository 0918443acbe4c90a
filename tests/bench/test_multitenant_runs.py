"""Which kept runs count, and how a run is stopped by its driver."""

import json
from dataclasses import replace

import pytest
from bench import multitenant_runs as runs
from bench.multitenant_workload import MODES, Workload
from bench.sources import Sources

WORKLOAD, MODE = Workload(2, 0.0, 1), next(one for one in MODES if one.letter == "D")


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


def test_a_run_that_failed_is_not_kept(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("ended with code 1")

    monkeypatch.setattr(runs, "_run", fail)
    with pytest.raises(RuntimeError, match="code 1"):
        runs.run(WORKLOAD, MODE, runs.RunSetting(tmp_path))
    assert not list(tmp_path.rglob("done.json"))
