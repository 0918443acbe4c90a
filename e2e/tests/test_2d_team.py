"""A job of two agents: one sandbox, two policies with versions of their own, and an adapter of each to fetch."""

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from marlaas_e2e.api import Object
from marlaas_e2e.platform import ROOT, Platform

TEAM, NAME = "team-p", "relay"
AGENTS = ("caller", "reader")
STEPS = 3


def job() -> Object:
    """The example's job, shortened."""
    documents = yaml.safe_load_all((ROOT / "examples" / "agents" / "relay.yaml").read_text())
    (body,) = (each for each in documents if each["kind"] == "RLJob")
    body["metadata"]["namespace"] = TEAM
    optimizer = {"learningRate": 1e-3}  # PyYAML reads the file's 1e-3 as a string, which kubectl does not
    body["spec"]["training"] |= {"steps": STEPS, "groupsPerStep": 8, "maxStaleness": 0, "optimizer": optimizer}
    body["spec"]["evaluation"] = {"tasks": 8, "every": STEPS}
    return dict(body)


@pytest.fixture(scope="module")
def ended(platform: Platform) -> Object:
    """The status of the job at its end, on the pool of the scenarios before."""
    platform.tiny_pool()
    platform.tenant(TEAM)
    platform.apply(job())
    return platform.ended(NAME, TEAM)


def test_both_agents_of_a_job_are_trained(ended: Object) -> None:
    assert ended["phase"] == "Succeeded", ended
    assert (ended["step"], ended["steps"]) == (STEPS, STEPS)
    versions = {one["name"]: one["policyVersion"] for one in ended["agents"]}
    assert versions.keys() == set(AGENTS)
    assert all(1 <= version <= STEPS for version in versions.values()), versions


def test_kubectl_get_shows_the_versions_of_both_agents(platform: Platform, ended: Object) -> None:
    heading, row = platform.kubectl("get", "rljobs", "-n", TEAM).splitlines()
    shown = dict(zip(heading.split(), row.split(), strict=False))
    expected = {"NAME": NAME, "POOL": "tiny", "PHASE": "Succeeded", "STEP": f"{STEPS}/{STEPS}"}
    assert shown | expected == shown
    assert shown["VERSION"] == ended["versions"] == "/".join(str(one["policyVersion"]) for one in ended["agents"])


def test_both_agents_have_rewards_and_evaluations_of_their_own(ended: Object) -> None:
    for one in ended["agents"]:
        assert {"reward", "evalBefore", "evalLast", "staleness"} <= one.keys(), one
    assert ended["evalLast"] == pytest.approx(sum(one["evalLast"] for one in ended["agents"]) / len(AGENTS), abs=2e-3)


def test_each_agents_adapter_is_fetched_by_its_name(platform: Platform, ended: Object, tmp_path: Path) -> None:
    weights = {}
    for one in ended["agents"]:
        folder = tmp_path / one["name"]
        told = platform.marlaas("adapter", NAME, "--agent", one["name"], "--out", folder, "-n", TEAM)
        assert f"version {one['policyVersion']} of agent {one['name']}" in told
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
        weights[one["name"]] = hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert len(set(weights.values())) == len(AGENTS), weights
