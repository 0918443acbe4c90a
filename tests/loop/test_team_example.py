"""examples/agents/relay.yaml and solver-verifier.yaml on the tiny model, with few steps."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.harness import job_document
from tests.loop.harness import Loop

from marlaas_api.messages import JobDocument, Phase

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"


def spec_of(name: str) -> dict[str, Any]:
    """The spec of an example with two steps."""
    _, manifest = yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text())
    spec: dict[str, Any] = {key: value for key, value in manifest["spec"].items() if key != "poolRef"}
    spec["training"] |= {"steps": 2, "groupsPerStep": 2, "maxRefill": 0}
    return spec | {"evaluation": {"tasks": 4, "every": 2}}


def relay() -> JobDocument:
    """The relay in strict mode, in which every run has the same episodes."""
    spec = spec_of("relay")
    spec["training"] |= {"groupsPerStep": 4, "maxStaleness": 0}
    return job_document("relay", uid="relay", seed=7, spec=spec)


def solver_verifier() -> JobDocument:
    """The solver and the verifier with adapters and replies that fit the tiny model."""
    spec = spec_of("solver-verifier")
    for agent, rank in zip(spec["agents"], (1, 8), strict=True):
        agent["adapter"] = {"rank": rank}
    spec["rollout"] = {"groupSize": 2, "maxTokens": 8, "maxTurns": 1}
    return job_document("example", uid=hashlib.sha256(b"example").hexdigest()[:12], seed=7, spec=spec)


async def test_the_examples_of_teams_play_on_the_tiny_model(tiny_model, tmp_path):
    """The tiny model cannot add in words, so the solver's steps may train nothing; the job must end and its metrics be there."""
    jobs = (relay(), solver_verifier())
    async with Loop(tiny_model, tmp_path) as loop:
        for job in jobs:
            await loop.submit(job)
        ends = [await loop.finished(job, 120) for job in jobs]
        assert [(end.phase, end.faults) for end in ends] == [(Phase.SUCCEEDED, {})] * 2, ends
        of_relay, of_solver = [await loop.steps(job) for job in jobs]
    assert [step.agents.keys() for step in of_solver] == [{"solver", "verifier"}] * 2
    for step in of_relay:
        caller, reader = step.agents["caller"], step.agents["reader"]
        assert caller.reward_mean == reader.reward_mean == step.reward_mean, "both have the team's reward"
    assert {name: version > 0 for name, version in ends[0].versions.items()} == {"caller": True, "reader": True}
