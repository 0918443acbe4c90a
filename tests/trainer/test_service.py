"""The role as a whole: what it publishes, whom it trains, and that nobody disturbs anybody."""

from dataclasses import replace

import pytest
import torch
from tests.trainer.jobs import assignment_of, job
from tests.trainer.test_learner import away

from marlaas_api.health import exposition
from marlaas_api.messages import TrajectoryRef
from marlaas_api.names import episode_id, train_group
from marlaas_worker.adapters import has_effect, read_adapter
from marlaas_worker.calibration import NUM_FLOAT32_PROBES
from marlaas_worker.health import families
from marlaas_worker.rl.advantages import advantages
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.optimizer import TrainingState
from marlaas_worker.trainer.rows import chain


async def test_a_job_is_trained_step_by_step_and_its_logprobs_are_the_samplers(harness):
    document = job()
    async with harness.training(document):
        await harness.play(document, 3)
        metrics = harness.metrics["trainer-0"]
        assert metrics.ready()
        page = exposition(families(metrics.all_samples())).splitlines()
        labels = f'job="{document.job}",namespace="{document.namespace}"'
        assert f'marlaas_trainer_commits_total{{agent="policy",{labels}}} 4.0' in page
        assert any(line.startswith(f"marlaas_trainer_job_seconds_total{{{labels}}} ") for line in page)
    assert not metrics.ready()
    manifests = await harness.history(document)
    assert [(manifest.version, manifest.step) for manifest in manifests] == [(3, 2), (2, 1), (1, 0), (0, -1)]
    consumed = [group for manifest in reversed(manifests) for group in manifest.consumed]
    assert consumed == [f"{document.uid}-t{index}" for index in range(6)]
    for manifest in manifests[:-1]:
        assert manifest.metrics["logprob_gap"] < 1e-5
        assert manifest.metrics["ess"] > 0.999
        assert manifest.metrics["grad_norm"] > 0
    adapters = {manifest.files["adapter_model.safetensors"].sha256 for manifest in manifests}
    assert len(adapters) == 4
    zero = manifests[-1]
    tensors, config = read_adapter({name: await harness.blobs.get(ref) for name, ref in zero.files.items()})
    assert not has_effect(tensors)
    assert (config.rank, config.alpha, zero.parent, len(zero.probes)) == (8, 16, None, NUM_FLOAT32_PROBES)


async def test_the_reference_is_the_version_so_many_before_the_one_that_is_trained(harness, base):
    document = job(kl={"coefficient": 0.1, "reference": {"versionsBehind": 2}}, steps=5)
    await harness.trained(document, steps=5)
    made = {manifest.version: manifest for manifest in await harness.history(document)}
    weights = {number: await harness.weights(manifest) for number, manifest in made.items()}
    assert [made[number].metrics["kl"] > 1e-6 for number in (1, 2, 3)] == [False, True, True]
    learner = Learner(base, assignment_of(document))
    for trained_on, reference in ((3, 1), (4, 2)):
        learner.restore(weights[trained_on], TrainingState())
        learner.refer_to(weights[reference])
        rows = [chain(part) for group in await harness.groups(document, trained_on) for part in group]
        learner.accumulate(rows)
        assert learner.step(0)["kl"] == pytest.approx(made[trained_on + 1].metrics["kl"], rel=1e-4)


async def test_kl_in_the_reward_is_subtracted_before_rewards_are_compared(harness, base):
    kl = {"coefficient": 3.0, "addedTo": "reward"}
    document = job(kl=kl, algorithm="rloo")
    await harness.trained(document, steps=2)
    made = {manifest.version: manifest for manifest in await harness.history(document)}
    learner = Learner(base, assignment_of(document))
    learner.restore(await harness.weights(made[1]), TrainingState())
    costs, tokens, rows = 0.0, 0, []
    for group in await harness.groups(document, 1):  # advantages without KL, one segment a trajectory
        gaps = learner.kl_by_trajectory([chain(part) for part in group], len(group))
        lowered = advantages("leave-one-out", [-3.0 * gap for gap in gaps])  # linear: advantages add up
        rows += [
            chain(replace(part, advantage=part.advantage + more)) for part, more in zip(group, lowered, strict=True)
        ]
        costs, tokens = costs + float(gaps.sum()), tokens + sum(int(part.generated.sum()) for part in group)
    learner.accumulate(rows)
    found = learner.step(0)
    for name in ("loss", "grad_norm", "kl"):
        assert made[2].metrics[name] == pytest.approx(found[name], rel=1e-3), name
    assert made[2].metrics["kl"] == pytest.approx(costs / tokens, rel=1e-3)


async def test_truncated_episodes_are_filtered_counted_and_teach_nothing(harness):
    document = job(overlong={"filter": True})
    before = await harness.trained(document, steps=0)
    assert await harness.trained(document, steps=1) == before  # every turn of this world is cut off
    metrics = (await harness.history(document))[0].metrics
    assert (metrics["overlong_filtered"], metrics["tokens"], metrics["grad_norm"]) == (6.0, 0.0, 0.0)


@pytest.mark.parametrize("has_adapter", [False, True], ids=["of the base model", "of an adapter"])
async def test_a_frozen_agent_gets_version_zero_and_is_let_go(harness, base, tmp_path, has_adapter):
    given = away(base, tmp_path / "judge") if has_adapter else None
    document = job(agent={"trainable": False} | ({"initFrom": {"path": str(given)}} if given else {}))
    async with harness.training(document):
        assert (await harness.report(lambda report: not report.bound)).num_running == 0
    assert (await harness.record(document)).epoch == 0
    weights = await harness.weights(*await harness.history(document))
    assert has_effect(weights) == has_adapter
    if given:
        expected, _ = read_adapter(given)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


async def test_agents_trained_in_turn_end_exactly_where_each_ends_alone(harness):
    wide = job(
        "wide", agent={"adapter": {"rank": 16, "alpha": 16, "targets": ["q_proj", "down_proj"]}}, algorithm="rloo"
    )
    documents = [job("one"), wide, job("other", microbatchTokens=16, kl={"coefficient": 0.05})]
    together = await harness.trained(*documents)
    for document, among_others in zip(documents, together, strict=True):
        assert await (await harness.another()).trained(document) == [among_others]


async def test_rewards_that_are_compared_across_a_step_wait_for_its_end_and_teach_between_groups(harness):
    gradients = {}
    for algorithm in ("grpo", "reinforce++"):
        document = job(algorithm.strip("+"), algorithm=algorithm, maxStaleness=1)
        await harness.admit(document)
        async with harness.trainer():
            await harness.version(document, 0)
            for position in (0, 1):  # everybody right in one group, everybody wrong in the other
                episodes = [episode_id(train_group(document.ref, position), member, 1) for member in range(3)]
                refs = tuple(
                    TrajectoryRef(member=member, episode=episode, leaves=(0,), reward=float(position))
                    for member, episode in enumerate(episodes)
                )
                await harness.assign(document, 0, [position], trajectories=refs)
            await harness.close(document, 0, 2)
            await harness.version(document, 1)
        gradients[algorithm] = (await harness.history(document))[0].metrics["grad_norm"]
    assert gradients["grpo"] == 0.0
    assert gradients["reinforce++"] > 0.0


async def test_groups_of_the_next_step_that_come_early_wait_for_it(harness):
    document = job(maxStaleness=1)
    async with harness.training(document):
        await harness.assign(document, 0, [0, 1])
        await harness.assign(document, 1, [0, 1], base_version=1)
        await harness.close(document, 0, 2)
        await harness.close(document, 1, 2, base_version=1)
        await harness.version(document, 2)
    second, first, _ = await harness.history(document)
    assert (first.consumed, second.consumed) == (("uid-sums-t0", "uid-sums-t1"), ("uid-sums-t2", "uid-sums-t3"))
    assert second.metrics["logprob_gap"] > 1e-4 > first.metrics["logprob_gap"]  # one version stale, and so off policy
