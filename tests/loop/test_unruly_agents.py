"""Agents that always fail, are never called, or flood: faults are classed, the others learn, and the end of the job is explained."""

from pathlib import Path

import pytest
from tests.loop.harness import Loop, document

from marlaas_api.messages import JobDocument, Phase, Progress, StepRecord

pytestmark = pytest.mark.slow

AGENTS = ("steady", "faulty", "silent", "flood")
MAX_TURNS = 4


def unruly(**environment: object) -> JobDocument:
    """A job of four agents. Every second task ends in a fault."""
    job = document("unruly", environment="teams:unruly", maxRefill=8)
    (agent,) = job.spec.agents
    agents = tuple(agent.model_copy(update={"name": name}) for name in AGENTS)
    played = job.spec.environment.model_copy(update={"max_attempts": 2, **environment})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"agents": agents, "environment": played})})


async def run(model: Path, folder: Path, job: JobDocument) -> tuple[Progress, list[StepRecord]]:
    async with Loop(model, folder) as loop:
        await loop.submit(job)
        return await loop.finished(job, 120), await loop.steps(job)


@pytest.fixture(autouse=True)
def _teams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


async def test_the_others_learn_and_the_end_says_why_two_have_not(tiny_model, tmp_path):
    progress, steps = await run(tiny_model, tmp_path, unruly(max_fault_share=1.0))
    assert (progress.phase, progress.reason) == (Phase.SUCCEEDED, "Finished"), progress.message
    assert progress.versions == {"steady": 2, "faulty": 0, "silent": 0, "flood": 2}
    assert progress.message == (
        "2 steps, versions steady 2, faulty 0, silent 0, flood 2; "
        "not trained: faulty (all its turns were lost to faults), silent (never called)"
    )
    assert set(progress.faults) == {"env"}
    groups = [index for step in steps for index in step.indices]
    assert progress.faults["env"] >= 2 * 4 * sum(index % 2 for index in groups), "each of 4 members is played twice"
    for step in steps:
        assert [step.agents[name].num_groups for name in AGENTS] == [2, 0, 0, 2]
    usage = {name: progress.usage[name] for name in AGENTS if name in progress.usage}
    assert usage["flood"].failed_tokens == 0, "it spoke in no task with a fault"
    assert usage["flood"].trained_tokens > usage["steady"].trained_tokens > 0
    assert usage["faulty"].generated_tokens == usage["faulty"].failed_tokens + usage["faulty"].repeated_tokens > 0


async def test_too_many_faults_end_the_job_with_the_last_one(tiny_model, tmp_path):
    progress, _ = await run(tiny_model, tmp_path, unruly(max_fault_share=0.2))
    assert (progress.phase, progress.reason) == (Phase.FAILED, "TooManyFaults")
    assert "the last one: env: " in progress.message
    assert "KeyError: 'nothing'" in progress.message
