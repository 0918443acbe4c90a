"""Strict mode with the engine fake: the same seed gives the same adapter, bit for bit, whatever happens around it."""

import asyncio
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from tests.harness import Harness, changed
from tests.loop.harness import Loop, document, run, train, weights_of
from tests.loop.test_agents import run as run_team
from tests.loop.test_agents import team

from marlaas_api import subjects, wire
from marlaas_api.messages import JobDocument, JobEvent, StepRecord
from marlaas_api.reasons import Reason
from marlaas_worker.orchestrator import preemption

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def undisturbed(tiny_model, tmp_path_factory):
    """What a run gives when nothing happens to it."""
    return asyncio.run(run(tiny_model, tmp_path_factory.mktemp("undisturbed"), document()))


async def test_the_same_seed_twice_is_the_same_adapter_at_every_version(tiny_model, tmp_path, undisturbed):
    weights, steps, _ = await run(tiny_model, tmp_path, document())
    assert weights == undisturbed[0]
    assert len(set(weights)) == 3, "every step changed something"
    assert [step.reward_mean for step in steps] == [step.reward_mean for step in undisturbed[1]]


async def test_in_bfloat16_too_a_run_that_was_killed_gives_the_adapter_of_one_that_was_not(tiny_model, tmp_path):
    weights, _, _ = await run(tiny_model, tmp_path / "first", document(), dtype="bfloat16")
    killed, _, deaths = await run(
        tiny_model, tmp_path / "second", document(), "trainer.commit.after_blobs", dtype="bfloat16"
    )
    assert len(deaths) == 1
    assert killed == weights
    assert len(set(weights)) == 3


async def test_another_seed_is_another_adapter(tiny_model, tmp_path, undisturbed):
    weights, _, _ = await run(tiny_model, tmp_path, document(seed=8))
    assert weights[-1] != undisturbed[0][-1]


NUM_OTHERS, SLOTS, EARLY = 31, 7, 5
SINGLE = 2
"""A strict job among the early ones."""


def other(number: int) -> JobDocument:
    """A small job, the early ones of the same tenant as ours; every sixth one has an environment that always fails."""
    environment = "rogues:raises" if number % 6 == 5 else "reverse"
    steps = 4 if number < EARLY else 1 + number % 2
    training = {"steps": steps, "groupsPerStep": 1, "maxStaleness": number % 2, "maxRefill": 0}
    made = document(f"other-{number}", seed=number, environment=environment, **training)
    small = {"rollout": made.spec.rollout.model_copy(update={"group_size": 2, "max_turns": 1})}
    tenant = "team-a" if number < EARLY else f"team-{'bcd'[number % 3]}"
    return changed(made, **small).model_copy(update={"namespace": tenant, "tenant": tenant})


async def play(loop: Loop, number: int) -> str:
    """Run one of the others; every sixth one leaves once it is admitted. Return why it ended."""
    job = other(number)
    await loop.submit(job)
    if number % 6 != 4 or number < EARLY:
        return (await loop.finished(job, 300)).reason
    await loop.progress(job, lambda progress: progress.admitted or progress.phase.final)
    await Harness.submit(loop, job.model_copy(update={"deleted": True, "generation": 3}))
    return "left"


async def crowd(loop: Loop, draw: random.Random) -> Counter[str]:
    """Let the others join at random moments; return why they ended."""
    going: set[asyncio.Task[str]] = set()
    ended: Counter[str] = Counter()
    for number in draw.sample(range(EARLY, NUM_OTHERS), NUM_OTHERS - EARLY):
        going.add(asyncio.create_task(play(loop, number)))
        if len(going) > draw.randrange(2, 12):
            done, going = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
            ended.update(task.result() for task in done)
    ended.update(await asyncio.gather(*going))
    return ended


async def test_among_31_others_that_join_leave_fail_and_are_preempted_adapters_are_the_same_as_alone(
    tiny_model, tmp_path, monkeypatch
):
    """Those of a team whose agents speak at the same time, and of one of the others."""
    folders = Path(__file__).parent, Path(__file__).parents[1] / "sandbox"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)), prepend=os.pathsep)
    job = team(steps=3).model_copy(update={"created_at": 1.0})  # the youngest of its tenant yields first
    alone, steps, _ = await run_team(tiny_model, tmp_path / "alone", job)
    single, _, _ = await run(tiny_model, tmp_path / "single", other(SINGLE))
    monkeypatch.setattr(preemption, "MIN_RUN_S", 0.0)
    async with Loop(tiny_model, tmp_path / "crowd", slots=SLOTS, agentsPerSlot=1) as loop:
        early = [asyncio.create_task(play(loop, number)) for number in range(EARLY)]
        for number in range(EARLY):
            await loop.progress(other(number), lambda progress: progress.admitted)
        ours = asyncio.create_task(train(loop, job, 300))
        await loop.progress(job, lambda progress: progress.admitted)
        ended = await crowd(loop, random.Random(3))
        _, beside = await ours
        weights, beside_single = await weights_of(loop, job), await weights_of(loop, other(SINGLE))
        ended.update(await asyncio.gather(*early))
        events = [wire.decode_as(JobEvent, one.data) for one in await loop.bus.replay(subjects.EVENTS, "event.>")]
    assert (weights, beside_single) == (alone, {"policy": single})
    assert [step.reward_mean for step in beside] == [step.reward_mean for step in steps]
    assert [len(set(versions)) for versions in weights.values()] == [4, 4]
    assert ended == {"Finished": 22, "left": 4, "TooManyFaults": 5}
    assert {event.job for event in events if event.reason == Reason.PREEMPTED} > {job.job}


SEAMS = [
    "trainer.commit.before_blobs",
    "trainer.commit.after_blobs",
    "trainer.commit.after_manifest",
    "trainer.commit.after_set",
    "trainer.commit.after_acks",
    "orchestrator.issue.after_ledger",
    "orchestrator.issue.after_task",
    "orchestrator.assign.after_log",
    "orchestrator.record.after_step",
    "sandbox.episode.after_publish",
    "sandbox.task.before_ack",
]


@pytest.mark.parametrize("seam", SEAMS)
async def test_killed_at_a_seam_and_resumed_it_is_the_same_adapter(tiny_model, tmp_path, undisturbed, seam):
    weights, steps, deaths = await run(tiny_model, tmp_path, document(), seam)
    assert deaths == [seam]
    assert weights == undisturbed[0]
    assert [step.step for step in steps] == [0, 1]
    assert [step.indices for step in steps] == [step.indices for step in undisturbed[1]]
    assert [trained_tokens(step) for step in steps] == [trained_tokens(step) for step in undisturbed[1]]
    assert all(trained_tokens(step) > 0 for step in steps)


def trained_tokens(step: StepRecord) -> int:
    return step.usage["policy"].trained_tokens


async def test_every_token_that_was_trained_was_sampled_by_the_version_on_record(tiny_model, tmp_path):
    job = document(maxStaleness=1, steps=3)
    async with Loop(tiny_model, tmp_path) as loop:
        _, steps = await train(loop, job)
        manifests = await loop.manifests(job)
    assert all(0 <= step.staleness_max <= 1 for step in steps)
    assert manifests[1].metrics["logprob_gap"] < 1e-4
    assert all(step.metrics["train_s"] > 0 for step in steps)
    consumed = [name for manifest in manifests for name in manifest.consumed]
    assert len(consumed) == len(set(consumed))
