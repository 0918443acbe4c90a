"""Gateway to MLflow's client, configured by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.

Without a URI, the store is a folder beside the job's files.
"""

import logging
import os
import shlex
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run

from marlaas.trackers.seam import DATA, End, MetricRow, settings
from marlaas_api.messages import JobDocument

log = logging.getLogger(__name__)

_UID = "marlaas.uid"
_STATUS = {End.SUCCEEDED: "FINISHED", End.FAILED: "FAILED", End.DELETED: "KILLED"}
_MAX_TEXT = 500
_MAX_PARAMS = 100


class MlflowTracker:
    """An MLflow run with the job's uid as a tag, by which a later process finds it again. A row is one call, with its own step and time."""

    def __init__(self, client: MlflowClient, run: Run, uri: str) -> None:
        self._client = client
        self._run_id = run.info.run_id
        self._experiment_id = run.info.experiment_id
        self._uri = uri
        self._steps: dict[str, set[int]] = {}
        self._data_digest = run.data.tags.get(DATA, "")

    @property
    def where(self) -> str:
        if self._uri.startswith(("http:", "https:")):
            return f"{_without_login(self._uri)}/#/experiments/{self._experiment_id}/runs/{self._run_id}"
        install = "" if find_spec("flask") else "pip install mlflow && "  # mlflow-skinny has no server
        allow = "MLFLOW_ALLOW_FILE_STORE=true " if self._uri.startswith("file:") else ""
        return f"{install}{allow}mlflow ui --backend-store-uri {shlex.quote(self._uri)}"

    def log(self, number: int, row: MetricRow) -> None:
        if row.samples:
            self._log_samples(row)
        if row.data_digest not in ("", self._data_digest):
            self._client.set_tag(self._run_id, DATA, row.data_digest)  # a parameter could not change
            self._data_digest = row.data_digest
        at_ms = round(row.at * 1000)
        metrics = [Metric(name, value, at_ms, row.finished) for name, value in row.values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _log_samples(self, row: MetricRow) -> None:
        """Store the samples before the metrics, by which the row counts as delivered. Without a store of artifacts there are none."""
        columns, samples = row.table
        try:
            self._client.log_dict(
                self._run_id, {"columns": columns, "data": samples}, f"samples/{row.finished:06d}.json"
            )
        except Exception as error:
            log.warning("no samples for MLflow, whose artifacts cannot be written: %s: %s", type(error).__name__, error)

    def has(self, number: int, row: MetricRow) -> bool:
        """Look for the row's last metric: a store may write the metrics of a row one after another, in order."""
        name = next(reversed(list(row.values)), None)
        if name is None:
            return True
        if name not in self._steps:
            self._steps[name] = {metric.step for metric in self._client.get_metric_history(self._run_id, name)}
        return row.finished in self._steps[name]

    def close(self, end: End | None) -> None:
        if end is not None:
            self._client.set_terminated(self._run_id, _STATUS[end])


def open_tracker(document: JobDocument, folder: Path) -> MlflowTracker:
    """Resume the run with the job's uid, or create one."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        # MLflow asks for a database unless the store is small and private; this one is, and needs no database
        # driver.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = (folder / "mlruns").absolute().as_uri()
    client = MlflowClient(tracking_uri=uri)
    experiment = _experiment(client, os.environ.get("MLFLOW_EXPERIMENT_NAME", "marlaas"))
    return MlflowTracker(client, _run(client, experiment, document), uri)


def _without_login(uri: str) -> str:
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")


def _tags(document: JobDocument) -> dict[str, str]:
    return {_UID: document.uid, "marlaas.namespace": document.namespace, "marlaas.job": document.job}


def _experiment(client: MlflowClient, name: str) -> str:
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found is not None else client.create_experiment(name))


def _run(client: MlflowClient, experiment: str, document: JobDocument) -> Run:
    found = client.search_runs([experiment], f"tags.`{_UID}` = '{document.uid}'", max_results=1)
    if found:
        client.update_run(found[0].info.run_id, status="RUNNING")
        return found[0]
    run = client.create_run(experiment, run_name=str(document.ref), tags=_tags(document))
    pairs = list(settings(document).items())[:_MAX_PARAMS]
    client.log_batch(run.info.run_id, params=[Param(name, str(value)[:_MAX_TEXT]) for name, value in pairs])
    return run
