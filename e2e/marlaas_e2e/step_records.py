"""What the bus holds of a job, read where the orchestrator reads it, with the orchestrator's own credential."""

import json
from pathlib import Path
from typing import Any

import yaml

from marlaas_e2e.platform import NAMESPACE, RELEASE, Platform

_PROGRAM = yaml.safe_load(Path(__file__).with_name("programs.yaml").read_text())["step_records"]


def keys(platform: Platform, prefix: str) -> list[str]:
    return list(_answer(platform, "keys", prefix))


def assert_exact(platform: Platform, namespace: str, job: str) -> None:
    """Assert that a job that does not run has one record for each of its steps, and that no task was counted in two steps."""
    body = platform.get("rljob", job, namespace)
    found = _answer(platform, "steps", namespace, job, body["metadata"]["uid"])
    assert [record[0] for record in found] == list(range(body["status"]["step"]))
    trained = [index for record in found for index in record[4]]
    assert len(trained) == len(set(trained)), "a task was counted in two steps"
    assert body["status"]["agents"][0]["policyVersion"] == found[-1][1]


def _answer(platform: Platform, question: str, *words: str) -> list[Any]:
    place = [f"nats://{RELEASE}-nats.{NAMESPACE}.svc:4222", "/etc/marlaas/bus/orchestrator.creds"]
    pod = f"deployment/{RELEASE}-orchestrator"
    return list(json.loads(platform.python(pod, "orchestrator", _PROGRAM, *place, question, *words)))
