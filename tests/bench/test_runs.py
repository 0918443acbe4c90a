"""A run that is measured from outside."""

import subprocess

import pytest
from bench import runs


def test_a_run_ends_with_its_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[subprocess.Popen[bytes]] = []

    def stop(process: "subprocess.Popen[bytes]") -> dict[str, int]:
        watched.append(process)
        raise SystemExit("terminated")

    monkeypatch.setattr(runs, "_watch", stop)
    with pytest.raises(SystemExit):
        runs.run(runs.documents("quickstart.yaml"))
    assert watched[0].returncode is not None


def test_a_run_without_a_summary_is_an_error_with_the_end_of_its_log() -> None:
    with pytest.raises(RuntimeError, match="no RLJob in"):
        runs.run(runs.documents("quickstart.yaml")[:1])
