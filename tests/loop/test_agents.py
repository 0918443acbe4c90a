"""Several agents in a job, in strict mode: adapters are the same bit for bit, whatever the pace of turns and whoever is killed."""

import asyncio
from pathlib import Path

import pytest
from tests.harness import kill_at
from tests.loop.harness import Loop, document

from marlaas_api.messages import JobDocument, Phase, StepRecord
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
    model: Path, folder: Path, job: JobDocument, *kill: str
) -> tuple[dict[str, list[str]], list[StepRecord], list[str]]:
    """Run a job; return each agent's weights of all versions, the steps, and where roles died."""
    async with Loop(model, folder) as loop:
        if kill:
            kill_at(*kill)
        await loop.submit(job)
        level = await loop.finished(job, 120)
        assert level.phase is Phase.SUCCEEDED, f"{level.reason}: {level.message}"
        histories = {agent.name: await loop.history(job, agent.name) for agent in job.spec.agents}
        weights = {
            name: [one.files[TENSORS_FILE].sha256 for one in history[::-1]] for name, history in histories.items()
        }
        return weights, await loop.steps(job), loop.deaths


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
    assert [step.agents.keys() for step in steps] == [set(AGENTS)] * 2


async def test_an_async_environment_gives_the_same_adapters_as_its_twin_in_threads(tiny_model, tmp_path, undisturbed):
    weights, _, _ = await run(tiny_model, tmp_path, team("teams:in_tasks"))
    assert weights == undisturbed[0]


@pytest.mark.parametrize(
    "seam",
    [
        "trainer.commit.after_blobs",
        "trainer.commit.after_set",
        "orchestrator.issue.after_ledger",
        "orchestrator.assign.after_log",
        "sandbox.episode.after_publish",
    ],
)
async def test_killed_at_a_seam_and_resumed_both_adapters_are_the_same(tiny_model, tmp_path, undisturbed, seam):
    weights, steps, deaths = await run(tiny_model, tmp_path, team(), seam)
    assert deaths == [seam]
    assert weights == undisturbed[0]
    assert [step.indices for step in steps] == [step.indices for step in undisturbed[1]]


@pytest.mark.parametrize("speaker", AGENTS)
async def test_an_agent_learns_the_same_bits_as_in_a_job_of_its_own(tiny_model, tmp_path, undisturbed, speaker):
    """Both speak in every episode, independently. The other one is frozen and silent in the job that it is compared with."""
    (other,) = set(AGENTS) - {speaker}
    weights, _, _ = await run(tiny_model, tmp_path, team("teams:Alone", frozen=other, speaker=speaker))
    assert weights[speaker] == undisturbed[0][speaker]
