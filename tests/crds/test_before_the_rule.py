"""An object that was stored before a rule of its kind existed: it can still be given a status, be changed elsewhere, and go."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.crds.client import Api, problems
from tests.crds.table import TABLES

from marlaas_api.kinds import RLJob
from marlaas_e2e.control_plane import ControlPlane
from tools import crd

IN_FORCE_S = 120.0
OLD = "older-than-the-rule"
TOO_COLD = "spec.rollout.temperature"


def cold(name: str) -> dict[str, Any]:
    body = TABLES["RLJob"].object_with(TOO_COLD, 0)
    return {**body, "metadata": {"name": name}}


def without_the_rule(definition: dict[str, Any]) -> dict[str, Any]:
    part = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for step in TOO_COLD.split("."):
        part = part["properties"][step]
    del part["x-kubernetes-validations"]
    return definition


def serve(plane: ControlPlane, api: Api, definition: dict[str, Any], *, taken: bool) -> None:
    """Have the server take or refuse a temperature of 0, which it does a moment after it has the definition."""
    plane.kubectl("apply", "-f", "-", stdin=json.dumps(definition))
    until = time.monotonic() + IN_FORCE_S
    while (problems(api.create(cold("probe"), dry=True)) == set()) != taken:
        assert time.monotonic() < until


@pytest.fixture
def old(plane: ControlPlane, api: Api) -> Iterator[str]:
    """Name of a job with a temperature of 0, in a server that has the rule since."""
    try:
        serve(plane, api, without_the_rule(crd.definition(RLJob)), taken=True)
        assert problems(api.create(cold(OLD))) == set()
    finally:
        serve(plane, api, crd.definition(RLJob), taken=False)
    yield OLD
    api.delete("RLJob", OLD)


def test_an_object_from_before_a_rule_takes_a_status_a_finalizer_and_changes_elsewhere(api: Api, old: str) -> None:
    status = {"phase": "Queued", "reason": "InvalidSpec", "message": f"{TOO_COLD}: must be at least 0.01, found 0"}
    for change, part in (
        ({"status": status}, True),
        ({"metadata": {"finalizers": ["marlaas.dev/job"]}}, False),
        ({"spec": {"suspend": True}}, False),
        ({"metadata": {"finalizers": None}}, False),
    ):
        assert problems(api.patch("RLJob", old, change, status=part, dry=False)) == set(), change
    stored = api.get("RLJob", old)
    assert (stored["status"], stored["spec"]["rollout"]["temperature"]) == (status, 0)
