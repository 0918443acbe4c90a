"""What we show people to apply is taken as it stands, and a changed job is answered with a sentence."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.crds.client import Api, problems

from marlaas_api.kinds import API_VERSION
from marlaas_e2e.control_plane import ControlPlane
from marlaas_e2e.kubectl import CommandFailed

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))
JOB = """
apiVersion: marlaas.dev/v1alpha1
kind: RLJob
metadata: {name: changing}
spec:
  poolRef: {name: tiny}
  environment: {name: reverse, args: {size: 4}}
  training: {steps: 10}
"""


def _ours(path: Path) -> bool:
    return f"apiVersion: {API_VERSION}" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [path for path in EXAMPLES if _ours(path)], ids=lambda path: path.stem)
def test_every_example_is_taken_as_kubectl_reads_it(plane: ControlPlane, api: Api, path: Path) -> None:
    """But for its namespace, which is not made here."""
    for body in _objects(plane.kubectl("create", "--dry-run=client", "--output=json", "-f", path)):
        if body["apiVersion"] == API_VERSION:
            body["metadata"].pop("namespace", None)
            assert problems(api.create(body, dry=True)) == set(), body["metadata"]["name"]


def _objects(text: str) -> Iterator[Any]:
    """JSON objects one after the other, as kubectl prints them."""
    while text := text.strip():
        body, end = json.JSONDecoder().raw_decode(text)
        yield body
        text = text[end:]


def test_kubectl_apply_raises_steps_and_refuses_what_is_fixed_with_a_sentence(plane: ControlPlane, api: Api) -> None:
    plane.kubectl("apply", "-f", "-", stdin=JOB)
    try:
        assert "configured" in plane.kubectl("apply", "-f", "-", stdin=JOB.replace("steps: 10", "steps: 20"))
        with pytest.raises(CommandFailed) as lowered:
            plane.kubectl("apply", "-f", "-", stdin=JOB)
        assert "spec.training.steps: Invalid value: 10: may be raised but not lowered" in lowered.value.stderr
        with pytest.raises(CommandFailed) as renamed:
            plane.kubectl("apply", "-f", "-", stdin=JOB.replace("size:", "length:").replace("10", "20"))
        sentence = (
            "spec.environment: Invalid value: cannot change once the job exists; delete the job and create a new one"
        )
        assert sentence in renamed.value.stderr
    finally:
        api.delete("RLJob", "changing")
