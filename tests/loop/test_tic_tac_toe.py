"""Two steps of examples/agents/tic-tac-toe.yaml with the reference engine, and the policy that the bench computes from its adapter."""

from pathlib import Path

import pytest
from bench.policy_reader import PolicyReader
from bench.runs import documents
from bench.tic_tac_toe import uniform
from bench.tic_tac_toe_runs import both_marks, policy_of
from tests.harness import job_document
from tests.loop.harness import Loop

from marlaas.envs.tic_tac_toe import EMPTY
from marlaas_api.messages import JobDocument, Phase

pytestmark = pytest.mark.slow


def example() -> JobDocument:
    """The example's job with fewer steps and games."""
    _, job = documents("agents/tic-tac-toe.yaml")
    spec = job["spec"]
    spec["agents"][0]["adapter"]["rank"] = 8
    spec["rollout"]["groupSize"] = 4
    spec["training"] |= {"steps": 2, "groupsPerStep": 4}
    spec["evaluation"]["tasks"] = 2
    return job_document("tic-tac-toe", uid="ttt", spec=spec)


async def test_one_policy_plays_both_marks_and_its_past_is_never_trained(tiny_model: Path, tmp_path: Path) -> None:
    job = example()
    async with Loop(tiny_model, tmp_path) as loop:
        await loop.submit(job)
        level = await loop.finished(job, 120)
        assert level.phase is Phase.SUCCEEDED, f"{level.reason}: {level.message}"
        steps = await loop.steps(job)
        newest = (await loop.history(job, "x"))[0]
        files = {name: await loop.blobs.get(ref) for name, ref in newest.files.items()}
    assert newest.version == 2
    assert [step.agents["x"].version for step in steps] == [step.agents["o"].version for step in steps] == [1, 2]
    assert sum(step.usage["x"].trained_tokens for step in steps) > 0
    assert sum(step.usage["past"].trained_tokens if "past" in step.usage else 0 for step in steps) == 0
    policy = policy_of(PolicyReader(tiny_model), files)
    assert 0.0 < sum(policy[EMPTY].values()) < 1.0
    found = both_marks(policy, uniform)
    assert found.won + found.drawn + found.lost + found.illegal == pytest.approx(1.0)
