"""A real MLflow server over HTTP that does what it is asked and then loses the answer."""

import io
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.exporter.delivering import delivered
from tests.harness import a_progress, a_step, job_document
from werkzeug.serving import make_server

from marlaas.trackers.seam import row_of
from marlaas_worker.exporter.service import SETTINGS


@dataclass
class Lossy:
    """The server, and what it was told: calls by step. lost: numbers of calls whose answer is lost after their effect."""

    app: Callable[..., Iterable[bytes]]
    lost: set[int] = field(default_factory=set)
    told: Counter[int] = field(default_factory=Counter)
    url: str = ""

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if not environ["PATH_INFO"].endswith("log-batch"):
            return self.app(environ, start)
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        self.told.update({metric["step"] for metric in json.loads(body).get("metrics", ())})
        answer = b"".join(self.app({**environ, "wsgi.input": io.BytesIO(body)}, lambda *_: None))
        is_lost = self.told.total() in self.lost
        start("504 Gateway Timeout" if is_lost else "200 OK", [("Content-Type", "application/json")])
        return [b"" if is_lost else answer]


@pytest.fixture
def lossy(tmp_path, monkeypatch) -> Iterator[Lossy]:
    for name, value in {**SETTINGS, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_MLFLOW_SERVER_FILE_STORE", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", str(tmp_path))
    from mlflow.server import app

    made = Lossy(app)
    server = make_server("127.0.0.1", 0, made, threaded=True)
    made.url = f"http://someone:hunter2@127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield made
    server.shutdown()
    server.server_close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_step_is_told_once_although_answers_are_lost_and_exporters_are_killed(lossy, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    document = job_document(spec={"training": {"steps": 6}, "export": {"trackers": ["mlflow"]}})
    rows = tuple(row_of(a_step(document, n, version=n + 1, at=100.0 + n, reward_mean=0.25 * n)) for n in range(6))
    end = a_progress(document, phase="Succeeded", step=6, steps=6)
    lossy.lost = {2, 5}
    looks = ((1, False), (3, False), (3, True), (6, False), (6, False), (6, True))
    prepare = lambda: monkeypatch.setenv("MLFLOW_TRACKING_URI", lossy.url)  # noqa: E731  # the server changes it
    destination, failures = delivered("mlflow", document, rows, end, tmp_path, looks, prepare)
    assert (len(failures), lossy.told) == (2, dict.fromkeys(range(1, 7), 1)), failures
    assert "hunter2" not in str((failures, destination.url))
    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("marlaas").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/train")
    assert [(one.step, one.timestamp, one.value) for one in history] == [
        (n + 1, 100_000 + 1000 * n, 0.25 * n) for n in range(6)
    ]
    assert run.info.status == "FINISHED"
    tags = {"marlaas.uid": "uid-sums", "marlaas.namespace": "team-a", "marlaas.job": "sums"}
    assert tags.items() <= run.data.tags.items()
