"""Agents of one job on two pools, in strict mode: adapters are the same bit for bit as on one pool, whoever is killed."""

import asyncio
from pathlib import Path

import pytest
from tests.harness import Killed
from tests.loop.harness import POOL, Loop, train
from tests.loop.test_agents import team

from marlaas_api import failpoints
from marlaas_api.messages import JobDocument, StepRecord
from marlaas_api.messages.agent_settings import NameRef
from marlaas_worker.adapters import TENSORS_FILE

pytestmark = pytest.mark.slow

Weights = dict[str, list[str]]


def two(pool: str = "") -> JobDocument:
    """The team of `test_agents`; its second agent on this pool, or on the job's."""
    job = team()
    first, second = job.spec.agents
    agents = first, second.model_copy(update={"pool_ref": NameRef(name=pool) if pool else None})
    rollout = job.spec.rollout.model_copy(update={"max_turns": 8})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"agents": agents, "rollout": rollout})})


async def run(loop: Loop, job: JobDocument) -> tuple[Weights, list[StepRecord]]:
    """Run a job; return each agent's weights of all versions, and the steps."""
    async with loop:
        _, steps = await train(loop, job, 120)
        return await weights_of(loop, job), steps


async def weights_of(loop: Loop, job: JobDocument) -> Weights:
    found = {}
    for agent in job.spec.agents:
        history = await loop.history(job, agent.name)
        found[agent.name] = [one.files[TENSORS_FILE].sha256 for one in history[::-1]]
    return found


def kill_trainer_of(pool: str, place: str) -> None:
    """Kill the trainer of a pool when it passes a failpoint for the second time."""
    passed: list[str] = []

    def hook(name: str) -> None:
        if name == place and POOL.get("") == pool:
            passed.append(name)
            if len(passed) == 2:
                raise Killed(name)

    failpoints.hook = hook


@pytest.fixture(autouse=True)
def _teams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture(scope="module")
def on_one_pool(tiny_model, tmp_path_factory) -> tuple[Weights, list[StepRecord]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        return asyncio.run(run(Loop(tiny_model, tmp_path_factory.mktemp("one")), two()))


async def test_agents_on_two_pools_train_the_same_bits_as_on_one(tiny_model, tmp_path, on_one_pool):
    loop = Loop(tiny_model, tmp_path, also=["big"])
    weights, steps = await run(loop, two("big"))
    assert weights == on_one_pool[0]
    assert [len(set(versions)) for versions in weights.values()] == [3, 3], "every step changed both"
    assert [step.step for step in steps] == [step.step for step in on_one_pool[1]] == [0, 1]


async def test_a_trainer_of_the_second_pool_that_dies_before_a_commit_changes_nothing(
    tiny_model, tmp_path, on_one_pool
):
    loop, place = Loop(tiny_model, tmp_path, also=["big"]), "trainer.commit.after_manifest"
    kill_trainer_of("big", place)
    weights, _ = await run(loop, two("big"))
    assert loop.deaths == [place]
    assert weights == on_one_pool[0]


async def test_each_pool_serves_and_trains_its_own_agents_only(tiny_model, tmp_path):
    async with Loop(tiny_model, tmp_path, also=["big"]) as loop:
        job = two("big")
        await train(loop, job, 120)
        names = {"tiny": {"solver"}, "big": {"verifier"}}
        for pool, agents in names.items():
            report = await loop.reported(lambda one: bool(one.verified), "rollout", "rollout-0", pool)
            assert {
                agent for agent in ("solver", "verifier") if any(agent in name for name in report.verified)
            } == agents
