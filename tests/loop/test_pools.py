"""A job whose agents are on two pools, also of different base models, makes the same adapters bit for bit after any kill."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load
from tests.harness import Harness, changed
from tests.killing import Killed
from tests.loop.harness import POOL, Loop, document, kill_at_each, train, weights_of
from tests.loop.test_agents import AGENTS, team

from marlaas_api import failpoints, subjects
from marlaas_api.messages import JobDocument, Manifest, Phase, Progress, StepRecord
from marlaas_api.messages.agent_settings import NameRef
from marlaas_worker.adapters import TENSORS_FILE

pytestmark = pytest.mark.slow

Weights = dict[str, list[str]]
SEAMS = {"rollout.record.after_publish": 20, "trainer.commit.after_manifest": 2}
"""Failpoints of the second pool's roles, and which pass is killed: the trainer's second one is the first step's commit."""


def two(pool: str = "", environment: str = "teams:at_once", **training: int) -> JobDocument:
    """The team of `test_agents`; its second agent on this pool, or on the job's."""
    job = team(environment, **training)
    first, second = job.spec.agents
    agents = first, second.model_copy(update={"pool_ref": NameRef(name=pool) if pool else None})
    rollout = job.spec.rollout.model_copy(update={"max_turns": 8})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"agents": agents, "rollout": rollout})})


async def run(loop: Loop, job: JobDocument) -> tuple[Weights, list[StepRecord]]:
    """Run a job; return each agent's weights of all versions, and the steps."""
    async with loop:
        _, steps = await train(loop, job, 120)
        return await weights_of(loop, job), steps


@pytest.fixture(autouse=True)
def _teams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture(scope="module")
def on_one_pool(tiny_model, tmp_path_factory) -> tuple[Weights, list[StepRecord]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        return asyncio.run(run(Loop(tiny_model, tmp_path_factory.mktemp("one")), two()))


@dataclass(frozen=True)
class OnTwoBases:
    """A job on pools of two base models that ended well, and one whose second pool has gone.

    tensors: by agent, the adapter's file. verified: by pool, the adapters that its replica has proven.
    """

    weights: Weights
    steps: list[StepRecord]
    histories: dict[str, list[Manifest]]
    tensors: dict[str, bytes]
    verified: dict[str, tuple[str, ...]]
    waits: Progress
    ended: Progress
    ended_steps: list[StepRecord]
    ended_weights: Weights


async def engine_dies_for_good(loop: Loop, pool: str) -> None:
    """Kill the replica of the last pool within a turn; its report expires."""

    def hook(place: str) -> None:
        if place == "rollout.record.before_publish" and POOL.get("") == pool:
            loop.stop("rollout-0")
            raise Killed(place)

    failpoints.hook = hook
    await loop.until(lambda: bool(loop.deaths))
    await (await loop.bus.bucket(subjects.REPLICAS)).delete(subjects.replica_key("rollout", pool, "rollout-0"))


async def run_on_two_bases(loop: Loop) -> OnTwoBases:
    async with loop:
        job, other = two("big"), two("big", steps=50).model_copy(update={"job": "left", "uid": "left"})
        _, steps = await train(loop, job, 120)
        histories = {name: await loop.history(job, name) for name in AGENTS}
        tensors = {name: await loop.blobs.get(history[0].files[TENSORS_FILE]) for name, history in histories.items()}
        reports = [
            await loop.reported(lambda one: bool(one.verified), "rollout", "rollout-0", p.name) for p in loop.pools
        ]
        await loop.submit(other)
        await loop.progress(other, lambda level: level.step == 1)
        await engine_dies_for_good(loop, "big")
        waits = await loop.progress(other, lambda level: level.reason == "WaitingForPool")
        await Harness.submit(loop, changed(other, active_deadline_seconds=0.001))
        ended = await loop.progress(other, lambda level: level.phase.final)
        return OnTwoBases(
            await weights_of(loop, job),
            steps,
            histories,
            tensors,
            {report.pool: report.verified for report in reports},
            waits,
            ended,
            await loop.steps(other),
            await weights_of(loop, other),
        )


@pytest.fixture(scope="module")
def on_two_bases(tiny_model, other_model, tmp_path_factory) -> OnTwoBases:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        return asyncio.run(
            run_on_two_bases(Loop(tiny_model, tmp_path_factory.mktemp("bases"), also={"big": other_model}))
        )


async def test_two_jobs_that_need_each_others_pools_and_room_for_one_train_in_turn_the_same_bits_as_on_one_pool(
    tiny_model, tmp_path, on_one_pool
):
    """Each pool admits two agents, and a third job, without a sandbox, has one of the places on `tiny`."""
    holder = document("holder")
    first = two("big").model_copy(update={"created_at": 1.0})
    swapped = {"job": "swapped", "uid": "swapped", "pool": "big", "created_at": 2.0}
    jobs = [first, two("tiny").model_copy(update=swapped)]
    async with Loop(tiny_model, tmp_path, slots=2, agentsPerSlot=1, also={"big": tiny_model}) as loop:
        await Harness.submit(loop, holder)
        await loop.progress(holder, lambda level: level.admitted)
        for job in jobs:
            await loop.submit(job)
        waits = await loop.progress(jobs[1], lambda level: level.reason == "WaitingForSlots")
        ended = [await loop.finished(job, 120) for job in jobs]
        weights, steps = [await weights_of(loop, job) for job in jobs], [await loop.steps(job) for job in jobs]
    assert (waits.phase, waits.step) == (Phase.QUEUED, 0)
    assert [level.phase for level in ended] == [Phase.SUCCEEDED] * 2, [level.message for level in ended]
    assert ended[0].finished_at <= ended[1].started_at, "they are never admitted together"
    assert weights == [on_one_pool[0]] * 2
    assert [len(set(versions)) for versions in weights[0].values()] == [3, 3], "every step changed both"
    assert [[step.step for step in records] for records in (*steps, on_one_pool[1])] == [[0, 1]] * 3


def test_each_agent_is_sampled_from_and_trained_on_its_own_base_model(other_model, on_two_bases):
    """The trainer's logprobs of the sampled tokens are the engine's, on another base for each agent."""
    assert [len(set(versions)) for versions in on_two_bases.weights.values()] == [3, 3], "every step changed both"
    widths = {
        name: load(tensors)["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape[1]
        for name, tensors in on_two_bases.tensors.items()
    }
    other_width = json.loads((other_model / "config.json").read_text())["hidden_size"]
    assert widths == {"solver": 128, "verifier": other_width}
    for history in on_two_bases.histories.values():
        assert [manifest.metrics["logprob_gap"] < 1e-4 for manifest in history[:-1]] == [True, True]


def test_each_pool_proves_the_versions_of_its_own_agents_only(on_two_bases):
    shown = {
        pool: {agent for agent in AGENTS if any(agent in name for name in names)}
        for pool, names in on_two_bases.verified.items()
    }
    assert shown == {"tiny": {"solver"}, "big": {"verifier"}}


async def test_killed_engine_and_trainer_of_one_of_two_base_models_change_nothing(
    tiny_model, other_model, tmp_path, on_two_bases
):
    loop = Loop(tiny_model, tmp_path, also={"big": other_model})
    killed = kill_at_each(SEAMS, "big")
    weights, steps = await run(loop, two("big"))
    assert sorted(killed) == sorted(SEAMS)
    assert weights == on_two_bases.weights
    assert [step.indices for step in steps] == [step.indices for step in on_two_bases.steps]


def test_an_agent_whose_pool_disappears_keeps_what_the_others_learned_and_the_end_says_why(on_two_bases):
    missing = "no rollout replica of pool big (agent verifier) is ready"
    waits, ended, steps = on_two_bases.waits, on_two_bases.ended, on_two_bases.ended_steps
    assert (waits.phase, waits.message) == (Phase.RUNNING, f"{missing}; the job goes on when one is")
    assert (ended.phase, ended.reason) == (Phase.FAILED, "DeadlineExceeded")
    assert ended.message == f"still running after 0.001 s of being admitted (activeDeadlineSeconds); {missing}"
    assert ended.faults == {}, "waiting for an engine is none"
    assert [step.step for step in steps] == list(range(ended.step))
    for name in AGENTS:
        assert len(set(on_two_bases.ended_weights[name])) == ended.versions[name] + 1 > 1
        assert ended.usage[name].trained_tokens >= sum(step.usage[name].trained_tokens for step in steps) > 0
