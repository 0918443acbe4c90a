"""Strict mode with the engine fake: the same seed gives the same adapter, bit for bit, whatever happens around it."""

import asyncio

import pytest
from tests.loop.harness import Loop, document, run, train

from marlaas_api.messages import StepRecord

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


async def test_beside_three_other_jobs_it_is_the_same_adapter_as_alone(tiny_model, tmp_path, undisturbed):
    others = [document("other-a", seed=1), document("other-b", seed=2, maxStaleness=1), document("other-c", seed=3)]
    async with Loop(tiny_model, tmp_path) as loop:
        results = await asyncio.gather(*(train(loop, job) for job in [document(), *others]))
    assert results[0][0] == undisturbed[0]
    assert len({weights[-1] for weights, _ in results}) == 4


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
