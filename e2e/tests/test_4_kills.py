"""`kill -9` of every kind of container while a job runs, and a bus and an orchestrator that are away: the job goes on, `why` tells the truth, the accounts are exact."""

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from marlaas_e2e.api import Object
from marlaas_e2e.elsewhere import Elsewhere
from marlaas_e2e.kubectl import CommandFailed
from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform, endless, plain_pool, tenant
from marlaas_e2e.step_records import assert_exact

TEAM, JOB = "team-d", "survivor"
SLOW = ("rollout", "trainer")
"""These take seconds to come back, so `why` names them; for bus and orchestrator see the outages below."""
OUTAGES = {
    "orchestrator": (f"deployment/{RELEASE}-orchestrator", "WaitingForOrchestrator"),
    "bus": (f"statefulset/{RELEASE}-nats", "BusUnavailable"),
}


IS_HERE = Elsewhere.said().context is None
TRACKER = "203.0.113.10"
"""Address of an MLflow server in the node's network, a public one (RFC 5737)."""


def begin(_: Platform) -> list[Object]:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tracker", "namespace": TEAM}}
    secret["stringData"] = {"MLFLOW_TRACKING_URI": f"http://{TRACKER}:5000"}
    egress = [{"cidr": f"{TRACKER}/32", "ports": [5000]}]
    export = {"trackers": ["mlflow"], "secretRefs": [{"name": "tracker"}], "egress": egress} if IS_HERE else {}
    return [*plain_pool(), *tenant(TEAM), secret, endless(JOB, TEAM, export=export)]


@pytest.fixture(scope="module")
def mlflow(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the database of a real MLflow server, which starts after the job does, and its log."""
    folder = tmp_path_factory.mktemp("mlflow")
    if not IS_HERE:
        yield folder
        return
    subprocess.run(["ip", "address", "replace", f"{TRACKER}/32", "dev", "lo"], check=True)
    store = {"_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder}/mlflow.db", "_MLFLOW_SERVER_ARTIFACT_ROOT": str(folder)}
    given = {**os.environ, **store, "MLFLOW_SERVER_ALLOWED_HOSTS": "*", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = (sys.executable, "-m", "flask", "--app", "mlflow.server", "run", "--host", TRACKER, "--port", "5000")
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, env=given) as server:
        yield folder
        server.kill()


@pytest.fixture(scope="module", autouse=True)
def running(platform: Platform, mlflow: Path) -> None:
    platform.until(lambda: platform.step(JOB, TEAM), "the first step", 600)


KILLED = (("trainer",), ("orchestrator",), ("nats",), ("sandbox", "exporter", "operator"), ("rollout",))
"""Containers that are killed at the same time."""


def kill(platform: Platform, component: str) -> None:
    container = {"sandbox": "supervisor"}.get(component, component)
    namespace = TEAM if component in ("sandbox", "exporter") else NAMESPACE
    chosen = f"app.kubernetes.io/component={component},marlaas.dev/pool notin (tiny,shared,absent,crowded)"
    (pod,) = platform.names("pods", namespace, chosen)
    platform.cluster.kill_container(namespace, pod.removeprefix("pod/"), container)


@pytest.mark.parametrize("components", KILLED, ids=" and ".join)
def test_training_goes_on_after_a_kill(platform, components):
    for component in components:
        kill(platform, component)

    def named() -> bool:
        """Kill it again where it was back before anybody looked: Kubernetes waits longer each time."""
        if component in platform.why(JOB, TEAM):
            return True
        with contextlib.suppress(LookupError, CommandFailed):
            kill(platform, component)
        return False

    if component in SLOW:
        platform.until(named, f"`why` names the {component} that is away")
    platform.steps_on(JOB, TEAM, f"after {' and '.join(components)} was killed")


@pytest.mark.parametrize("missing", OUTAGES)
def test_why_names_what_is_away_and_takes_it_back(platform, missing):
    workload, reason = OUTAGES[missing]
    platform.kubectl("scale", "-n", NAMESPACE, workload, "--replicas=0")
    try:
        platform.until(lambda: reason == platform.status("rljob", JOB, TEAM)["reason"], f"the reason is {reason}")
        text = platform.why(JOB, TEAM)
    finally:
        platform.kubectl("scale", "-n", NAMESPACE, workload, "--replicas=1")
    assert [other for _, other in OUTAGES.values() if other in text] == [reason], text
    platform.steps_on(JOB, TEAM, f"after {missing} was away")
    platform.until(lambda: reason not in platform.why(JOB, TEAM), f"`why` says {reason} no more")
    assert platform.status("rljob", JOB, TEAM)["phase"] == "Running"


def test_the_accounts_are_exact_in_the_end_and_so_is_the_tracker(platform, mlflow):
    status = platform.status("rljob", JOB, TEAM)
    assert not status.get("faults"), "waiting is no fault"
    platform.patch("rljob", JOB, {"suspend": True}, TEAM)
    suspended = lambda: platform.status("rljob", JOB, TEAM)["phase"] == "Suspended"  # noqa: E731
    platform.until(suspended, "the job is suspended")
    assert_exact(platform, TEAM, JOB)
    if IS_HERE:
        reported = lambda: "rests" in platform.condition("rljob", JOB, "Reporting", TEAM).get("message", "")  # noqa: E731
        platform.until(reported, "everything is reported")
        step, query = platform.step(JOB, TEAM), "select step from metrics where key = 'step/version' order by step"
        with contextlib.closing(sqlite3.connect(mlflow / "mlflow.db")) as store:
            assert [row[0] for row in store.execute(query)] == list(range(1, step + 1))
        assert (mlflow / "log").read_text().count('runs/log-batch HTTP/1.1" 200') == step + 1, (
            "one call a step, and one with the settings"
        )
        assert TRACKER in platform.status("rljob", JOB, TEAM)["trackers"][0]["url"]
    events = platform.kubectl("describe", "rljob", JOB, "-n", TEAM).partition("Events:")[2]
    reasons = [words[1] for line in events.splitlines() if len(words := line.split()) > 1]
    assert not [reason for reason in reasons if "Failed" in reason], events
    platform.kubectl("delete", "rljob", JOB, "-n", TEAM, "--timeout=120s")
