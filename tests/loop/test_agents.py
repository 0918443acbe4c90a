"""Several agents in a job, in strict mode: adapters are the same bit for bit, whatever the pace of turns and whoever is killed."""

import asyncio
from pathlib import Path

import pytest
from tests.harness import kill_at
from tests.loop.harness import Loop, document, train

from marlaas_api.messages import JobDocument, Manifest, StepRecord
from marlaas_worker.adapters import TENSORS_FILE

pytestmark = pytest.mark.slow

AGENTS = ("solver", "verifier")


def team(environment: str = "teams:at_once", frozen: str = "", **args: str) -> JobDocument:
    """A job of two agents on tasks that all train something."""
    job = document("team", environment=environment, maxRefill=0)
    (agent,) = job.spec.agents
    agents = tuple(agent.model_copy(update={"name": name, "trainable": name != frozen}) for name in AGENTS)
    played = job.spec.environment.model_copy(update={"args": dict(args)})
    spec = job.spec.model_copy(update={"agents": agents, "environment": played})
    return job.model_copy(update={"spec": spec})


async def run(
    model: Path, folder: Path, job: JobDocument, *kill: str, **rollout: object
) -> tuple[dict[str, list[str]], list[StepRecord], list[str]]:
    """Run a job; return each agent's weights of all versions, the steps, and where roles died."""
    async with Loop(model, folder, **rollout) as loop:
        if kill:
            kill_at(*kill)
        _, steps = await train(loop, job, 120)
        weights = {}
        for agent in job.spec.agents:
            history: list[Manifest] = await loop.history(job, agent.name)
            weights[agent.name] = [one.files[TENSORS_FILE].sha256 for one in history[::-1]]
        return weights, steps, loop.deaths


@pytest.fixture(autouse=True)
def _teams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture(scope="session")
def undisturbed(tiny_model, tmp_path_factory):
    """What a run gives when nothing happens to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        return asyncio.run(run(tiny_model, tmp_path_factory.mktemp("undisturbed"), team()))


async def test_agents_that_speak_at_the_same_time_give_the_same_adapters_twice(tiny_model, tmp_path, undisturbed):
    weights, steps, _ = await run(tiny_model, tmp_path, team())
    assert weights == undisturbed[0]
    assert [len(set(versions)) for versions in weights.values()] == [3, 3], "every step changed both"
    assert [step.agents for step in steps] != []
