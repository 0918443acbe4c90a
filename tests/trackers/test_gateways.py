"""The libraries themselves, without a network: what was told lies where the gateway says."""

import json
import os
import shlex
import time
from pathlib import Path

import pytest

from marlaas.trackers.seam import End, open_tracker, rows


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the person who runs the tests."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def _told(name, document, folder, steps, evaluation):
    """Two processes, one after the other."""
    told = rows(steps(2), [evaluation(0)])
    for numbers, end in ((range(2), None), (range(2, 3), End.SUCCEEDED)):
        tracker = open_tracker(name, document(name), folder)
        for number in numbers:
            tracker.log(number, told[number])
        tracker.close(end)
    return tracker


def test_tensorboard_reads_back_every_figure_at_its_step(document, steps, evaluation, tmp_path):
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.util import tensor_util

    tracker = _told("tensorboard", document, tmp_path, steps, evaluation)
    assert str(tmp_path / "tensorboard") in tracker.where
    events = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard"))
    events.Reload()
    told = events.Tensors(".", "reward/train")
    found = [(event.step, event.wall_time, float(tensor_util.make_ndarray(event.tensor_proto))) for event in told]
    assert sorted(found) == [(1, 100.0, 0.0), (2, 101.0, 0.25)]
    read = lambda tag: [tensor_util.make_ndarray(one.tensor_proto) for one in events.Tensors(".", tag)]  # noqa: E731
    assert {events.SummaryMetadata(".", tag).plugin_data.plugin_name for tag in ("samples", "settings")} == {"text"}
    samples = [
        [b"suite", b"task", b"prompt", b"reply", b"reward"],
        [b"", b"    3", b"    reverse: ab", b"    ba", b"    1.0"],
    ]
    assert [one.tolist() for one in read("samples")] == [samples]
    settings = [dict(one.tolist()) for one in read("settings")]
    assert [one.get(b"    data.sha256") for one in settings] == [None, b"    d1", b"    d1"]
    assert settings[2][b"    training.optimizer.learningRate"] == b"    0.0001"


def test_mlflow_goes_on_with_the_run_of_the_job(document, steps, evaluation, tmp_path):
    from mlflow import MlflowClient

    tracker = _told("mlflow", document, tmp_path, steps, evaluation)
    assert shlex.split(tracker.where)[-2:] == ["--backend-store-uri", (tmp_path / "mlruns").as_uri()]
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("marlaas").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["training.optimizer.learningRate"] == "0.0001"
    assert run.data.tags["data.sha256"] == "d1"
    history = client.get_metric_history(run.info.run_id, "reward/train")
    found = [(metric.step, metric.timestamp, metric.value) for metric in history]
    assert found == [(1, 100000, 0.0), (2, 101000, 0.25)]
    (samples,) = tmp_path.glob("mlruns/*/*/artifacts/samples/000000.json")
    told = json.loads(samples.read_text())
    assert [dict(zip(told["columns"], one, strict=True)) for one in told["data"]] == [
        {"suite": "", "task": 3, "prompt": "reverse: ab", "reply": "ba", "reward": 1.0}
    ]


@pytest.mark.slow
def test_wandb_works_offline_under_the_jobs_own_id(document, steps, evaluation, tmp_path):
    tracker = _told("wandb", document, tmp_path, steps, evaluation)
    assert "wandb sync" in tracker.where
    files = list(tmp_path.glob("wandb/offline-run-*/run-uid-1.wandb"))
    assert len(files) == 2
    until = time.monotonic() + 30.0
    # wandb's service writes the file of an offline run, and may not have done so when the library returns.
    while not (are_written := all(b"reward/train" in path.read_bytes() for path in files)) and time.monotonic() < until:
        time.sleep(0.05)
    assert are_written
    assert b"data.sha256" in b"".join(path.read_bytes() for path in files)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.json")
    assert json.loads(table.read_text())["data"] == [["", 3, "reverse: ab", "ba", 1.0]]
