"""A job of two agents: one sandbox, two policies with versions of their own, and an adapter of each to fetch, which the exporter also writes to a claim."""

import hashlib
from pathlib import Path

import pytest
import yaml

from marlaas_e2e.api import Object
from marlaas_e2e.elsewhere import Elsewhere
from marlaas_e2e.node.volumes import CLASS, folder_of
from marlaas_e2e.platform import ROOT, Platform, plain_pool, tenant

TEAM, NAME = "team-p", "relay"
AGENTS = ("caller", "reader")
STEPS = 2
IS_HERE = Elsewhere.said().context is None
CLAIM: Object = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "adapters", "namespace": TEAM},
    "spec": {
        "storageClassName": CLASS,
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
    },
}


def begin(_: Platform) -> list[Object]:
    """The example's job, shortened, on the pool of the scenarios."""
    documents = yaml.safe_load_all((ROOT / "examples" / "agents" / f"{NAME}.yaml").read_text())
    (body,) = (each for each in documents if each["kind"] == "RLJob")
    body["metadata"]["namespace"] = TEAM
    body["spec"]["poolRef"] = {"name": "plain"}
    optimizer = {"learningRate": 1e-3}  # PyYAML reads the file's 1e-3 as a string, which kubectl does not
    body["spec"]["training"] |= {"steps": STEPS, "groupsPerStep": 4, "maxStaleness": 0, "optimizer": optimizer}
    body["spec"]["evaluation"] = {"tasks": 4, "every": STEPS}
    if IS_HERE:
        body["spec"]["export"] = {"volume": {"claimName": "adapters", "path": NAME}}
    return [*plain_pool(), *tenant(TEAM), *([CLAIM] if IS_HERE else []), body]


@pytest.fixture(scope="module")
def ended(platform: Platform) -> Object:
    return platform.ended(NAME, TEAM)


def test_both_agents_are_trained_and_evaluated_and_kubectl_get_shows_their_versions(platform, ended):
    assert (ended["phase"], ended["step"], ended["steps"]) == ("Succeeded", STEPS, STEPS), ended
    assert [one["name"] for one in ended["agents"]] == list(AGENTS)
    for one in ended["agents"]:
        assert {"reward", "evalBefore", "evalLast", "staleness"} <= one.keys(), one
        assert 1 <= one["policyVersion"] <= STEPS
    assert ended["evalLast"] == pytest.approx(sum(one["evalLast"] for one in ended["agents"]) / len(AGENTS), abs=2e-3)
    heading, row = platform.kubectl("get", "rljobs", NAME, "-n", TEAM).splitlines()
    shown = dict(zip(heading.split(), row.split(), strict=False))
    assert shown["VERSION"] == ended["versions"] == "/".join(str(one["policyVersion"]) for one in ended["agents"])


def exported(platform: Platform) -> Path:
    """The folder of this machine to which the exporter has written the job's adapters."""
    told = lambda: platform.condition("rljob", NAME, "Reporting", TEAM).get("message", "")  # noqa: E731
    platform.until(lambda: "everything is reported" in told(), "the adapters are exported")
    volumes = platform.cluster.get("persistentvolumes")["items"]
    (own,) = (
        each
        for each in volumes
        if each["spec"].get("claimRef", {}).get("namespace") == TEAM and "local" in each["spec"]
    )
    return folder_of(own) / NAME


def test_each_agents_adapter_is_fetched_by_its_name_and_exported(platform, ended, tmp_path):
    weights = set()
    for one in ended["agents"]:
        folder = tmp_path / one["name"]
        told = platform.marlaas("adapter", NAME, "--agent", one["name"], "--out", folder, "-n", TEAM)
        assert f"version {one['policyVersion']} of agent {one['name']}" in told
        assert (folder / "adapter_config.json").exists()
        weights.add(hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest())
        if IS_HERE:
            copy = exported(platform) / one["name"]
            assert {path.name for path in folder.iterdir()} | {"README.md", "marlaas.json"} <= {
                path.name for path in copy.iterdir()
            }
            assert (copy / "adapter_model.safetensors").read_bytes() == (
                folder / "adapter_model.safetensors"
            ).read_bytes()
    assert len(weights) == len(AGENTS)
