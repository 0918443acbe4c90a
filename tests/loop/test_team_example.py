"""examples/agents/solver-verifier.yaml on the tiny model, with few steps."""

import hashlib
from pathlib import Path

import pytest
import yaml
from tests.harness import job_document
from tests.loop.harness import Loop

from marlaas_api.messages import Phase

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "solver-verifier.yaml"


async def test_the_example_of_a_solver_and_a_verifier_plays_on_the_tiny_model(tiny_model, tmp_path):
    """The tiny model cannot add in words, so the steps may train nothing; the job must end and its metrics be there."""
    _, manifest = yaml.safe_load_all(EXAMPLE.read_text())
    spec = {key: value for key, value in manifest["spec"].items() if key != "poolRef"}
    for agent, rank in zip(spec["agents"], (1, 8), strict=True):
        agent["adapter"] = {"rank": rank}
    spec["training"] |= {"steps": 2, "groupsPerStep": 2, "maxRefill": 0}
    spec |= {"rollout": {"groupSize": 2, "maxTokens": 8, "maxTurns": 1}, "evaluation": {"tasks": 4, "every": 2}}
    job = job_document("example", uid=hashlib.sha256(b"example").hexdigest()[:12], seed=7, spec=spec)
    async with Loop(tiny_model, tmp_path) as loop:
        await loop.submit(job)
        level = await loop.finished(job, 120)
        assert level.phase is Phase.SUCCEEDED, f"{level.reason}: {level.message}"
        steps = await loop.steps(job)
    assert [step.step for step in steps] == [0, 1]
    assert [step.agents.keys() for step in steps] == [{"solver", "verifier"}] * 2
    assert level.faults == {}
