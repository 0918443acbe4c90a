"""Jobs of two agents: one sandbox, two policies with versions of their own, and an adapter of each to fetch.

`relay` is trained. `solver-verifier` is played only: the pool's tiny model cannot add, so it has no reward to learn from.
"""

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
JUDGED = "solver-verifier"
JUDGED_AGENTS = ("solver", "verifier")


def example(name: str) -> Object:
    """An example's job, in the scenario's namespace and on its pool."""
    documents = yaml.safe_load_all((ROOT / "examples" / "agents" / f"{name}.yaml").read_text())
    (body,) = (each for each in documents if each["kind"] == "RLJob")
    body["metadata"]["namespace"] = TEAM
    body["spec"]["poolRef"] = {"name": "tiny"}
    return dict(body)


def trained() -> Object:
    """`relay`, shortened."""
    body = example(NAME)
    optimizer = {"learningRate": 1e-3}  # PyYAML reads the file's 1e-3 as a string, which kubectl does not
    body["spec"]["training"] |= {"steps": STEPS, "groupsPerStep": 8, "maxStaleness": 0, "optimizer": optimizer}
    body["spec"]["evaluation"] = {"tasks": 8, "every": STEPS}
    return body


def judged() -> Object:
    """`solver-verifier` with one small step and adapters that the pool has room for."""
    body = example(JUDGED)
    body["spec"]["agents"] = [{"name": name, "adapter": {"rank": 8}} for name in JUDGED_AGENTS]
    body["spec"]["rollout"]["groupSize"] = 2
    body["spec"]["training"] = {"steps": 1, "groupsPerStep": 2, "maxRefill": 0, "maxStaleness": 0}
    body["spec"]["evaluation"] = {"tasks": 4, "every": 1}
    return body


@pytest.fixture(scope="module")
def applied(platform: Platform) -> None:
    """Both jobs, on the pool of the scenarios before."""
    platform.tiny_pool()
    platform.tenant(TEAM)
    platform.apply(trained(), judged())


@pytest.fixture(scope="module")
def ended(platform: Platform, applied: None) -> Object:
    """The status of `relay` at its end."""
    return platform.ended(NAME, TEAM)


@pytest.fixture(scope="module")
def ended_judged(platform: Platform, applied: None) -> Object:
    """The status of `solver-verifier` at its end."""
    return platform.ended(JUDGED, TEAM)


def fetched(platform: Platform, job: str, ended: Object, folder: Path) -> dict[str, str]:
    """Fetch the adapter of each agent by its name, and return the digests of their weights."""
    weights = {}
    for one in ended["agents"]:
        told = platform.marlaas("adapter", job, "--agent", one["name"], "--out", folder / one["name"], "-n", TEAM)
        assert f"version {one['policyVersion']} of agent {one['name']}" in told
        assert json.loads((folder / one["name"] / "adapter_config.json").read_text())["r"] == 8
        content = (folder / one["name"] / "adapter_model.safetensors").read_bytes()
        weights[one["name"]] = hashlib.sha256(content).hexdigest()
    return weights


def test_both_agents_of_a_job_are_trained(ended: Object) -> None:
    assert ended["phase"] == "Succeeded", ended
    assert (ended["step"], ended["steps"]) == (STEPS, STEPS)
    versions = {one["name"]: one["policyVersion"] for one in ended["agents"]}
    assert versions.keys() == set(AGENTS)
    assert all(1 <= version <= STEPS for version in versions.values()), versions


def test_kubectl_get_shows_the_versions_of_both_agents(platform: Platform, ended: Object) -> None:
    heading, row = platform.kubectl("get", "rljobs", NAME, "-n", TEAM).splitlines()
    shown = dict(zip(heading.split(), row.split(), strict=False))
    expected = {"NAME": NAME, "POOL": "tiny", "PHASE": "Succeeded", "STEP": f"{STEPS}/{STEPS}"}
    assert shown | expected == shown
    assert shown["VERSION"] == ended["versions"] == "/".join(str(one["policyVersion"]) for one in ended["agents"])


def test_both_agents_have_rewards_and_evaluations_of_their_own(ended: Object) -> None:
    for one in ended["agents"]:
        assert {"reward", "evalBefore", "evalLast", "staleness"} <= one.keys(), one
    assert ended["evalLast"] == pytest.approx(sum(one["evalLast"] for one in ended["agents"]) / len(AGENTS), abs=2e-3)


def test_each_agents_adapter_is_fetched_by_its_name(platform: Platform, ended: Object, tmp_path: Path) -> None:
    weights = fetched(platform, NAME, ended, tmp_path)
    assert weights.keys() == set(AGENTS)
    assert len(set(weights.values())) == len(AGENTS), weights


def test_a_solver_and_a_verifier_have_policies_evaluations_and_adapters_of_their_own(
    platform: Platform, ended_judged: Object, tmp_path: Path
) -> None:
    assert ended_judged["phase"] == "Succeeded", ended_judged
    assert (ended_judged["step"], ended_judged["steps"]) == (1, 1)
    assert [one["name"] for one in ended_judged["agents"]] == list(JUDGED_AGENTS)
    for one in ended_judged["agents"]:
        assert {"policyVersion", "evalBefore", "evalLast"} <= one.keys(), one
    assert fetched(platform, JUDGED, ended_judged, tmp_path).keys() == set(JUDGED_AGENTS)
