"""The manifest of `marlaas run`, with fewer steps, on a real vLLM: both teams' jobs succeed, and one exports its adapter to a claim. tests/loop/test_tour.py proves that a job learns.

It is checked after files that need no vLLM, because vLLM takes long to start.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from marlaas_e2e.api import Object
from marlaas_e2e.elsewhere import Elsewhere
from marlaas_e2e.node.volumes import CLASS, folder_of
from marlaas_e2e.platform import ROOT, Platform, tenant

JOBS = {"team-a": "reverse", "team-b": "calculator"}
STEPS = 2
IS_HERE = Elsewhere.said().context is None
CLAIM: Object = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "adapters", "namespace": "team-a"},
    "spec": {
        "storageClassName": CLASS,
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
    },
}
_SHORTER = {
    r"steps: \d+": f"steps: {STEPS}",
    r"groupsPerStep: \d+": "groupsPerStep: 4",
    r"tasks: \d+": "tasks: 8",
    r"(\d)e-3": r"\1.0e-3",
}
"""The last one because PyYAML reads 1e-3 as a string, which kubectl does not."""


def begin(_: Platform) -> list[Object]:
    text = (ROOT / "examples" / "quickstart.yaml").read_text()
    for pattern, replacement in _SHORTER.items():
        text = re.sub(pattern, replacement, text)
    objects = [*yaml.safe_load_all(text)]
    if IS_HERE:
        (job,) = (one for one in objects if one["metadata"]["name"] == "reverse")
        job["spec"]["export"] = {"volume": {"claimName": "adapters", "path": "reverse"}}
    tenants = [body for namespace in JOBS for body in tenant(namespace)]
    return [*tenants, *([CLAIM] if IS_HERE else []), *objects]


@pytest.fixture(scope="module", autouse=True)
def ended(platform: Platform) -> Iterator[dict[str, Object]]:
    """Status of each job at its end. The pool goes with the file: no later scenario needs a vLLM."""
    yield {job: platform.ended(job, namespace) for namespace, job in JOBS.items()}
    platform.kubectl("delete", "modelpool", "tiny", "--wait=false")


def test_both_teams_jobs_succeed(ended):
    for status in ended.values():
        assert (status["phase"], status["step"], status["steps"]) == ("Succeeded", STEPS, STEPS), status
        assert {"evalBefore", "evalLast"} <= status.keys()


def exported(platform: Platform) -> Path:
    """The folder of this machine to which the exporter has written the adapter of `reverse`."""
    told = lambda: platform.condition("rljob", "reverse", "Reporting", "team-a").get("message", "")  # noqa: E731
    platform.until(lambda: "everything is reported" in told(), "the adapter is exported")
    volumes = [one for one in platform.cluster.get("persistentvolumes")["items"] if "local" in one["spec"]]
    (own,) = (one for one in volumes if one["spec"].get("claimRef", {}).get("namespace") == "team-a")
    return folder_of(own) / "reverse"


def test_its_adapter_is_fetched_and_exported(platform, ended, tmp_path):
    (agent,), weights = ended["reverse"]["agents"], "adapter_model.safetensors"
    told = platform.marlaas("adapter", "reverse", "--out", tmp_path / "adapter", "-n", "team-a")
    assert f"version {agent['policyVersion']} of agent {agent['name']}" in told
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", weights} <= files
    if IS_HERE:
        assert files | {"README.md", "marlaas.json"} <= {path.name for path in exported(platform).iterdir()}
        assert (exported(platform) / weights).read_bytes() == (tmp_path / "adapter" / weights).read_bytes()


def test_a_finished_job_holds_nothing_but_its_adapter(platform, ended):
    platform.until(lambda: not platform.owned("team-a"), "the sandbox of a finished job is gone")
    (agent,) = ended["reverse"]["agents"]
    folders = "import os; print(*[folder for folder, _, _ in os.walk('/var/lib/marlaas/blobs')])"
    assert 1 <= agent["policyVersion"] <= STEPS
    assert agent["adapter"].rstrip("/").rsplit("/", 1)[-1] in platform.python("tiny-trainer-0", "trainer", folders)
