"""The role as a whole: what it publishes, whom it trains, and that nobody disturbs anybody."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.conftest import QUICK, World, job

from marlaas_api import subjects, wire
from marlaas_api.messages import JobDocument, Phase, ReplicaReport, StoryEvent, TrajectoryRef
from marlaas_api.names import episode_id, train_group
from marlaas_worker.adapters import AdapterConfig, has_effect, read_adapter, write_adapter
from marlaas_worker.trainer.model import BaseModel, ModelUnusable, initial_weights
from marlaas_worker.vitals import exposition

WITHIN_S = 60.0


async def trained(world: World, *documents: JobDocument, steps: int = 2) -> list[bytes]:
    """Adapters after some strict steps of jobs that are trained at the same time."""
    for document in documents:
        await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        for document in documents:
            tasks.create_task(world.play(document, steps))
    return [await world.adapter(document) for document in documents]


async def report(world: World, condition: Callable[[ReplicaReport], bool], name: str = "trainer-0") -> ReplicaReport:
    """Wait for a report."""
    async with (await world.bus.bucket(subjects.REPLICAS)).watch() as changes:
        async for entry in changes:
            if entry.key == subjects.replica_key("trainer", "tiny", name) and entry.data is not None:
                found = wire.decode_as(ReplicaReport, entry.data)
                if condition(found):
                    return found
    raise AssertionError("the watch ended")


# versions -----------------------------------------------------------------------------------------------------------


async def test_an_admitted_agent_gets_version_zero_an_exact_zero_adapter(world: World) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer():
        record = await world.version(document, 0)
    manifest = await world.manifest(record)
    tensors, config = read_adapter({name: await world.blobs.get(ref) for name, ref in manifest.files.items()})
    assert not has_effect(tensors)
    assert (config.rank, config.alpha, manifest.step, manifest.parent) == (8, 16, -1, None)
    assert (record.step, record.holder, len(manifest.probes)) == (-1, "trainer-0", 4)


async def test_a_trainer_says_that_it_is_ready_and_counts_its_commits(world: World) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer():
        await world.version(document, 0)
        vitals = world.vitals["trainer-0"]
        assert vitals.ready()
        page = exposition(vitals.all_figures()).splitlines()
        labels = f'namespace="{document.namespace}",job="{document.job}"'
        assert f'marlaas_trainer_commits_total{{{labels},agent="policy"}} 1' in page
        assert any(line.startswith(f"marlaas_trainer_job_seconds_total{{{labels}}} ") for line in page)
    assert not vitals.ready()


async def test_a_job_is_trained_step_by_step_and_its_logprobs_are_the_samplers(world: World) -> None:
    document = job()
    await trained(world, document, steps=3)
    manifests = await world.history(document)
    assert [(manifest.version, manifest.step) for manifest in manifests] == [(3, 2), (2, 1), (1, 0), (0, -1)]
    consumed = [group for manifest in reversed(manifests) for group in manifest.consumed]
    assert consumed == [f"{document.uid}-t{index}" for index in range(6)]
    for manifest in manifests[:-1]:
        assert manifest.metrics["logprob_gap"] < 1e-5
        assert manifest.metrics["ess"] > 0.999
        assert manifest.metrics["grad_norm"] > 0
    adapters = {manifest.files["adapter_model.safetensors"].sha256 for manifest in manifests}
    assert len(adapters) == 4


async def test_an_agent_begins_with_the_adapter_that_its_job_names_and_is_kept_near_it(
    world: World, base: BaseModel, tmp_path: Path
) -> None:
    attached = base.attach(8, 16, ())
    weights = initial_weights(attached.parameters, 11, "other")
    weights = {
        name: value + 0.02 * torch.sin(torch.arange(value.numel()).view(value.shape)) for name, value in weights.items()
    }
    for name, data in write_adapter(weights, AdapterConfig(8, 16)).items():
        (tmp_path / name).write_bytes(data)
    document = job(agent={"initFrom": {"path": str(tmp_path)}}, kl={"coefficient": 0.1})
    await trained(world, document, steps=2)
    second, first, zero = await world.history(document)
    found, _ = read_adapter({name: await world.blobs.get(ref) for name, ref in zero.files.items()})
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert first.metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert second.metrics["kl"] > 1e-6


async def test_a_frozen_agent_gets_version_zero_and_is_let_go(world: World) -> None:
    document = job(agent={"trainable": False})
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        assert (await report(world, lambda report: not report.bound)).num_running == 0
    assert (await world.record(document)).epoch == 0


async def test_only_admitted_jobs_of_the_own_pool_are_bound(world: World) -> None:
    queued, elsewhere, mine = job("queued"), job("elsewhere").model_copy(update={"pool": "large"}), job("mine")
    await world.admit(queued, admitted=False, phase=Phase.QUEUED)
    await world.admit(elsewhere)
    await world.admit(mine)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(mine, 0)
        found = await report(world, lambda report: bool(report.bound))
    assert found.bound == ("team-a.mine.uid-mine.policy@v0",)
    assert found.rss_bytes > 0
    assert len(await (await world.bus.bucket(subjects.POLICY)).entries()) == 1


# strictness and isolation -------------------------------------------------------------------------------------------


async def test_the_same_job_trains_to_the_same_bytes_twice(world: World, tiny_model: Path, tmp_path: Path) -> None:
    again = World(tiny_model, tmp_path, world.sampler)
    await again.bus.ensure()
    assert await trained(world, job()) == await trained(again, job())


async def test_agents_trained_in_turn_end_exactly_where_each_ends_alone(
    world: World, tiny_model: Path, tmp_path: Path
) -> None:
    wide = job(
        "wide", agent={"adapter": {"rank": 16, "alpha": 16, "targets": ["q_proj", "down_proj"]}}, algorithm="rloo"
    )
    documents = [job("one"), wide, job("other", microbatchTokens=16, kl={"coefficient": 0.05})]
    together = await trained(world, *documents)
    for document, among_others in zip(documents, together, strict=True):
        alone = World(tiny_model, tmp_path, world.sampler)
        await alone.bus.ensure()
        assert await trained(alone, document) == [among_others]


async def test_rewards_that_are_compared_across_a_step_wait_for_its_end_and_teach_between_groups(world: World) -> None:
    gradients = {}
    for algorithm in ("grpo", "reinforce++"):
        document = job(algorithm.strip("+"), algorithm=algorithm, maxStaleness=1)
        await world.admit(document)
        async with world.trainer(), asyncio.timeout(WITHIN_S):
            await world.version(document, 0)
            for position in (0, 1):  # everybody right in one group, everybody wrong in the other
                episodes = [episode_id(train_group(document.ref, position), member, 1) for member in range(3)]
                refs = tuple(
                    TrajectoryRef(member=member, episode=episode, leaves=(0,), reward=float(position))
                    for member, episode in enumerate(episodes)
                )
                await world.assign(document, 0, [position], trajectories=refs)
            await world.close(document, 0, 2)
            await world.version(document, 1)
        gradients[algorithm] = (await world.history(document))[0].metrics["grad_norm"]
    assert gradients["grpo"] == 0.0
    assert gradients["reinforce++"] > 0.0


async def test_groups_of_the_next_step_that_come_early_wait_for_it(world: World) -> None:
    document = job(maxStaleness=1)
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        await world.assign(document, 0, [0, 1])
        await world.assign(document, 1, [0, 1], base_version=1)
        await world.close(document, 0, 2)
        await world.close(document, 1, 2, base_version=1)
        await world.version(document, 2)
    second, first, _ = await world.history(document)
    assert (first.consumed, second.consumed) == (("uid-sums-t0", "uid-sums-t1"), ("uid-sums-t2", "uid-sums-t3"))
    assert second.metrics["logprob_gap"] > 1e-4 > first.metrics["logprob_gap"]  # one version stale, and so off policy


async def test_a_group_that_is_logged_twice_is_trained_once(world: World, tiny_model: Path, tmp_path: Path) -> None:
    document, once = job(), World(tiny_model, tmp_path, world.sampler)
    await once.bus.ensure()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        await world.assign(document, 0, [0, 0, 1, 0, 1])
        await world.close(document, 0, 2)
        await world.version(document, 1)
    assert await trained(once, document, steps=1) == [await world.adapter(document)]


# life and end of a job ----------------------------------------------------------------------------------------------


async def test_a_drained_trainer_leaves_the_old_version_true_and_the_next_one_goes_on(
    world: World, tiny_model: Path, tmp_path: Path
) -> None:
    document, straight = job(), World(tiny_model, tmp_path, world.sampler)
    await straight.bus.ensure()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        await world.assign(document, 0, [0])
        await report(world, lambda report: bool(report.bound))
    assert (await world.record(document)).version == 0
    assert await (await world.bus.bucket(subjects.REPLICAS)).entries() == []
    async with world.trainer("trainer-1"), asyncio.timeout(WITHIN_S):
        await world.assign(document, 0, [1])
        await world.close(document, 0, 2)
        await world.version(document, 1)
    assert await trained(straight, document, steps=1) == [await world.adapter(document)]


async def let_time_pass(world: World) -> None:
    """A second of the test's clock for every turn of the loop that a trainer takes."""
    while True:
        world.clock.at += 1.0
        world.server.wake()
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("level", [{"phase": Phase.SUCCEEDED}, {"admitted": False, "phase": Phase.SUSPENDED}])
async def test_a_job_that_ends_or_is_suspended_is_let_go_and_can_come_back(world: World, level: dict[str, Any]) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.play(document, 1)
        await report(world, lambda report: bool(report.bound))
        await world.admit(document, **level)
        await report(world, lambda report: not report.bound)
        await world.admit(document)
        await world.play(document, 1, first=1)
    assert [manifest.step for manifest in await world.history(document)] == [1, 0, -1]


async def test_a_job_that_is_over_leaves_no_consumer_and_one_that_is_drained_does(world: World) -> None:
    over, drained = job("over"), job("drained")
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        for document in (over, drained):
            await world.admit(document)
            await world.play(document, 1)
        await world.admit(over, phase=Phase.SUCCEEDED)
        await report(world, lambda report: report.bound == ("team-a.drained.uid-drained.policy@v1",))
    assert list(world.server.stream(subjects.GROUPS).consumers) == ["team-a_drained_policy_trainer"]


async def test_a_consumer_that_somebody_deletes_is_made_again(world: World) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.play(document, 1)
        await world.bus.delete_consumer(subjects.GROUPS, "team-a_sums_policy_trainer")
        await world.play(document, 1, first=1)
    assert (await world.record(document)).epoch == 0


async def test_what_is_committed_is_acked(world: World) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.play(document, 2)
        consumer = world.server.stream(subjects.GROUPS).consumers["team-a_sums_policy_trainer"]
        while consumer.next_sequence <= 6 or consumer.pending:
            await world.server.change(None, None)


async def test_a_new_job_of_an_old_name_begins_at_version_zero_and_hears_nothing_of_the_old(world: World) -> None:
    old = job()
    new = old.model_copy(update={"uid": "uid-new", "seed": 4})
    await world.admit(old)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.play(old, 1)
        before = await world.record(old)
        await world.admit(new)
        await world.play(new, 1)
    after = await world.record(new)
    assert (after.version, after.step) == (1, 0)
    assert after.epoch > before.epoch
    assert (await world.manifest(after)).consumed == ("uid-new-t0", "uid-new-t1")


async def test_an_outage_of_the_bus_costs_nothing_but_time(world: World, caplog: pytest.LogCaptureFixture) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.play(document, 1)
        await world.assign(document, 1, [0, 1])
        world.server.available = False
        while "cannot report" not in caplog.text or "cannot look" not in caplog.text:
            await world.server.change(0.01, None)
        world.server.available = True
        await world.close(document, 1, 2)
        await world.version(document, 2)
    assert (await world.record(document)).epoch == 0


# what is broken is loud ---------------------------------------------------------------------------------------------


async def failure(world: World, document: JobDocument) -> StoryEvent:
    """How training failed, on the first and on another trainer; a job beside it goes on."""
    neighbour = job("neighbour")
    await world.admit(document)
    await world.admit(neighbour)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        event = await world.told(document, "TrainingFailed")
        await world.play(neighbour, 1)
        async with world.trainer("trainer-1"):
            reports = [await report(world, lambda report: bool(report.broken), f"trainer-{n}") for n in (0, 1)]
    assert all(event.message.endswith(found.broken[document.uid]) for found in reports)
    return event


async def test_a_target_that_the_model_lacks_is_named_with_the_nearest_right_ones(world: World) -> None:
    event = await failure(world, job(agent={"adapter": {"targets": ["qproj"]}}))
    assert "'qproj' is no linear layer" in event.message
    assert "did you mean q_proj" in event.message


async def test_an_adapter_to_begin_from_that_is_not_there_is_named(world: World, tmp_path: Path) -> None:
    event = await failure(world, job(agent={"initFrom": {"path": str(tmp_path / "nowhere")}}))
    assert "no adapter_config.json in the adapter" in event.message


async def test_an_agent_that_failed_is_tried_again_after_a_while_and_then_no_longer_reported(
    world: World, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    document = job(agent={"initFrom": {"path": str(folder)}, "adapter": {"rank": 1, "alpha": 1, "targets": ["q_proj"]}})
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await report(world, lambda report: bool(report.broken))
        folder.mkdir()
        weights = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{kind}.weight" for kind in "AB"}
        shapes = {"A": (1, 64), "B": (64, 1)}
        tensors = {name: torch.ones(shapes[name[-8]]) for name in weights}
        for name, data in write_adapter(tensors, AdapterConfig(1, 1)).items():
            (folder / name).write_bytes(data)
        world.clock.at += 2 * QUICK.fault_s
        await world.version(document, 0)
        await report(world, lambda report: not report.broken)


async def test_a_step_for_another_version_fails_the_agent(world: World) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        await world.assign(document, 0, [0], base_version=3)
        event = await world.told(document, "TrainingFailed")
    assert "to be trained at version 3, and policy is at 0" in event.message


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"uid": "uid-stranger"}, "uid is 'uid-stranger'"),
        ({"version": 5}, "version is 5"),
        ({"temperature": 1.0}, "temperature is 1.0"),
        ({"adapter_sha256": "0" * 64}, "adapter_sha256 is '0000"),
        ({"logprobs": b"\0\0\0\0"}, "generated tokens with 1 logprobs"),
    ],
    ids=["uid", "version", "temperature", "adapter", "logprobs"],
)
async def test_a_turn_that_is_not_what_its_group_says_fails_the_agent_and_no_version_is_made(
    world: World, change: dict[str, Any], text: str
) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        world.tamper = lambda turn: turn.model_copy(update=change) if turn.member == 1 else turn
        await world.assign(document, 0, [0, 1])
        await world.close(document, 0, 2)
        event = await world.told(document, "TrainingFailed")
    assert text in event.message
    assert (await world.record(document)).version == 0


async def test_a_turn_that_stays_missing_fails_the_agent(world: World) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        world.tamper = lambda turn: None if turn.member == 1 else turn
        await world.assign(document, 0, [0])
        clock = asyncio.create_task(let_time_pass(world))
        event = await world.told(document, "TrainingFailed")
        clock.cancel()
    assert "turn.team-a.sums.uid-sums-t0-1-1.0 is not recorded" in event.message


async def test_a_turn_that_comes_late_is_waited_for(world: World) -> None:
    document = job()
    await world.admit(document)
    async with world.trainer(), asyncio.timeout(WITHIN_S):
        await world.version(document, 0)
        late = []
        world.tamper = lambda turn: late.append(turn) if turn.member == 1 else turn
        await world.assign(document, 0, [0, 1])
        await world.close(document, 0, 2)
        await report(world, lambda report: report.busy_s > 0)
        for turn in late:
            await world.publish_turn(turn)
        await world.version(document, 1)


async def test_a_pool_without_a_model_says_where_it_looked(world: World, tmp_path: Path) -> None:
    world.model = tmp_path / "nothing"
    with pytest.raises(ModelUnusable, match=r"no base model at .*nothing"):
        await world.serve("trainer-0", asyncio.Event())
