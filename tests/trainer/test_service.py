"""The role as a whole: what it publishes, whom it trains, the life and end of a job, and that nobody disturbs anybody."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
import torch
from tests.harness import WITHIN_S, changed, identity
from tests.trainer.harness import TIMING, assignment_of, job
from tests.trainer.test_learner import away

from marlaas_api import subjects, wire
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory import MemoryBus
from marlaas_api.bus_memory.consumers import MemoryConsumer
from marlaas_api.health import exposition
from marlaas_api.messages import (
    Calibration,
    GroupDecided,
    GroupReady,
    GroupUnused,
    Phase,
    StepClosed,
    StopReason,
    UntrainedCause,
)
from marlaas_worker.adapters import has_effect, read_adapter
from marlaas_worker.calibration import NUM_FLOAT32_PROBES
from marlaas_worker.health import families
from marlaas_worker.rl.advantages import advantages
from marlaas_worker.trainer.batching import chain
from marlaas_worker.trainer.intake import StepInbox
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.optimizer import TrainingState
from marlaas_worker.trainer.trained_agent import KEPT_S


async def test_a_job_is_trained_step_by_step_and_its_logprobs_are_the_samplers(harness):
    document = job()
    async with harness.training(document):
        await harness.play(document, 3)
        key = harness.policy_key(document)
        work = (await harness.report(lambda found: found.agent_work.get(key, (0.0,))[0] > 0)).agent_work[key]
        assert 0 < work[0] < work[1] < WITHIN_S, "busy for a part of the time for which it was bound"
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
    found = await harness.get(Calibration, subjects.CALIBRATIONS, "tiny.float32")
    assert (found.pool, found.trainer, found.tolerance) == ("tiny", "trainer-0", 1e-4)
    assert zero.probes == found.probes[:NUM_FLOAT32_PROBES]
    assert {(one.probe_tolerance, len(one.probes)) for one in manifests} == {(found.tolerance, NUM_FLOAT32_PROBES)}


async def test_a_step_of_which_no_token_counts_makes_no_version_and_the_next_one_is_trained_on_the_old(harness):
    document = job(overlong={"filter": True})
    async with harness.training(document):
        await harness.assign(document, 0, range(2))
        await harness.close(document, 0, 2, follows=-1)
        record = await harness.committed(document, lambda record: record.step == 0)
        found = [(one.step, one.cause, one.metrics["overlong_filtered"]) for one in record.untrained]
        assert (record.version, found) == (0, [(0, UntrainedCause.FILTERED, 6.0)])
        harness.tamper = lambda turn: turn.model_copy(update={"stop_reason": StopReason.STOP})
        await harness.step(document, 1)
        await harness.version(document, 1)
    assert [(one.version, one.step) for one in await harness.history(document)] == [(1, 1), (0, -1)]


async def test_a_step_of_fewer_groups_than_groups_per_step_is_smaller_where_flat_ones_count(harness):
    norms = {}
    for flat, place in (("excluded", harness), ("counted", await harness.another())):
        document = job(flatGroups=flat, groupsPerStep=4, optimizer={"maxGradNorm": 1e9})
        async with place.training(document):
            await place.assign(document, 0, range(1))
            await place.close(document, 0, 1)
            await place.version(document, 1)
        norms[flat] = (await place.history(document))[0].metrics["grad_norm"]
    assert norms["counted"] == pytest.approx(norms["excluded"] / 4, rel=1e-5)


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
        assert learner.step(0, 1)["kl"] == pytest.approx(made[trained_on + 1].metrics["kl"], rel=1e-4)


@pytest.mark.parametrize("epochs", [1, 2])
async def test_kl_in_the_reward_is_subtracted_before_rewards_are_compared(harness, base, epochs):
    kl = {"coefficient": 3.0, "addedTo": "reward"}
    document = job(kl=kl, algorithm="rloo", epochs=epochs)
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
    found = learner.step(0, 1)
    for name in ("loss", "grad_norm") if epochs == 1 else ():
        assert made[2].metrics[name] == pytest.approx(found[name], rel=1e-3), name
    assert made[2].metrics["kl"] == pytest.approx(costs / tokens, rel=1e-3)


@pytest.mark.parametrize("has_adapter", [False, True], ids=["of the base model", "of an adapter"])
async def test_a_frozen_agent_gets_version_zero_and_is_let_go(harness, base, tmp_path, has_adapter):
    given = away(base, tmp_path / "judge", named="org/other") if has_adapter else None
    document = job(agent={"trainable": False} | ({"initFrom": {"path": str(given)}} if given else {}))
    async with harness.training(document):
        assert (await harness.report(lambda report: not report.bound)).num_running == 0
    assert (await harness.record(document)).epoch == 0
    weights = await harness.weights(*await harness.history(document))
    assert has_effect(weights) == has_adapter
    if given:
        event = await harness.emitted(document, "BaseModelDiffers")
        assert f"initFrom {given}: the adapter was trained on org/other" in event.message
        expected, _ = read_adapter(given)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


async def test_agents_trained_in_turn_end_exactly_where_each_ends_alone(harness):
    adapter = {"rank": 16, "alpha": 16, "targets": ["q_proj", "down_proj"]}
    wide = job("wide", agent={"adapter": adapter}, algorithm="rloo")
    documents = [job("one"), wide, job("other", microbatchTokens=16, kl={"coefficient": 0.05})]
    together = await harness.trained(*documents)
    for document, among_others in zip(documents, together, strict=True):
        assert await (await harness.another()).trained(document) == [among_others]


AGENTS = ("solver", "verifier")
STEPS, GROUPS = 2, 3
IN_ORDER, BACKWARDS = (0, 1, 2, None), (None, 2, 1, 0)
"""A step's positions, and None for its end, in the order in which they are logged."""


def team():
    made = job(groupsPerStep=GROUPS)
    (agent,) = made.spec.agents
    agents = tuple(agent.model_copy(update={"name": name}) for name in AGENTS)
    return made.model_copy(update={"spec": made.spec.model_copy(update={"agents": agents})})


async def log(harness, document, step, entries):
    for position in entries:
        for name in AGENTS:
            if position is None:
                await harness.close(document, step, GROUPS, step, agent=name)
            else:
                await harness.assign(document, step, [position], agent=name)


async def versions(harness, document, version):
    for name in AGENTS:
        await harness.version(document, version, name)


async def adapters(harness, document):
    return {name: await harness.adapter(document, name) for name in AGENTS}


async def test_strict_agents_have_the_same_bits_however_their_groups_come(harness, monkeypatch):
    """Each step is sampled from the version before it; a group's place in the sum is its position."""
    found, document, taken, take = [], team(), asyncio.Queue[GroupReady](), StepInbox.take

    def observed(inbox, group):
        take(inbox, group)
        taken.put_nowait(group)

    monkeypatch.setattr(StepInbox, "take", observed)
    for entries in (IN_ORDER, BACKWARDS):
        trainers = await harness.another()
        async with trainers.training(document), asyncio.timeout(WITHIN_S):
            for step in range(STEPS):
                for position in entries:  # in order, one by one: nothing more is logged before a group is taken
                    await log(trainers, document, step, [position])
                    for _ in AGENTS if entries is IN_ORDER and position is not None else ():
                        await taken.get()
                await versions(trainers, document, step + 1)
        found.append(await adapters(trainers, document))
    async with harness.training(document):
        pass
    for step in range(STEPS):
        await log(harness, document, step, IN_ORDER)
        async with harness.trainer():  # it reads them all at once
            await versions(harness, document, step + 1)
    found.append(await adapters(harness, document))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) == 2


@pytest.mark.parametrize("by", ["itself", "another"])
async def test_an_agent_that_failed_is_trained_again_later_or_elsewhere(harness, base, tmp_path, by):
    document = job(agent={"initFrom": {"path": str(tmp_path / "adapter")}})
    await harness.admit(document)
    async with harness.trainer(), contextlib.AsyncExitStack() as others:
        await harness.report(lambda report: bool(report.broken))
        away(base, tmp_path / "adapter")
        if by == "itself":
            harness.clock.at += 2 * TIMING.fault_s
        else:
            await others.enter_async_context(harness.trainer("trainer-1"))
        await harness.version(document, 0)
        found = await harness.report(lambda report: not report.broken)
    assert found.refused == (() if by == "itself" else ("team-a.sums.policy",))


WRONG = [
    (lambda turn: turn.model_copy(update={"version": 5}), "version is 5"),
    (lambda turn: None, "turn.team-a.sums.uid-sums-t0-1-1.0 is not recorded"),
]


@pytest.mark.parametrize(("tamper", "words"), WRONG, ids=["wrong", "missing"])
async def test_a_wrong_turn_and_one_that_stays_missing_fail_the_agent_and_make_no_version(harness, tamper, words):
    document = job()
    async with harness.training(document):
        harness.tamper = lambda turn: tamper(turn) if turn.member == 1 else turn
        await harness.assign(document, 0, [0])
        clock = asyncio.create_task(harness.let_time_pass())
        event = await harness.emitted(document, "TrainingFailed")
        clock.cancel()
    assert words in event.message
    assert (await harness.record(document)).version == 0


async def test_a_turn_that_comes_late_is_waited_for_also_after_a_long_outage(harness, monkeypatch):
    document, last = job(), MemoryBus.last
    unreachable, missing = asyncio.Event(), asyncio.Event()

    async def in_an_outage(bus, stream, subject):
        unreachable.set()
        raise BusUnavailable("the bus cannot be reached")

    async def after_it(bus, stream, subject):
        found = await last(bus, stream, subject)
        if found is None:
            missing.set()
        return found

    async with harness.training(document), asyncio.timeout(WITHIN_S):
        late = []
        harness.tamper = lambda turn: late.append(turn) if turn.member == 1 else turn
        monkeypatch.setattr(MemoryBus, "last", in_an_outage)
        await harness.step(document, 0)
        await unreachable.wait()
        harness.clock.at += 2 * TIMING.missing_turn_s
        monkeypatch.setattr(MemoryBus, "last", after_it)
        await missing.wait()
        for turn in late:
            await harness.publish_turn(turn)
        await harness.version(document, 1)


async def test_a_drained_trainer_leaves_the_old_version_true_and_the_next_one_goes_on(harness):
    document, straight = job(), await harness.another()
    async with harness.training(document):
        await harness.assign(document, 0, [0])
        await harness.report(lambda report: bool(report.bound))
    assert (await harness.record(document)).version == 0
    assert await (await harness.bus.bucket(subjects.REPLICAS)).entries() == []
    async with harness.trainer("trainer-1"):
        await harness.assign(document, 0, [1])
        await harness.close(document, 0, 2)
        await harness.version(document, 1)
    assert await straight.trained(document, steps=1) == [await harness.adapter(document)]


@pytest.mark.parametrize("progress", [{"phase": Phase.SUCCEEDED}, {"admitted": False, "phase": Phase.SUSPENDED}])
async def test_a_job_that_ends_or_is_suspended_is_let_go_and_can_come_back(harness, progress):
    document = job()
    async with harness.training(document):
        await harness.play(document, 1)
        await harness.report(lambda report: bool(report.bound))
        await harness.admit(document, **progress)
        await harness.report(lambda report: not report.bound)
        await harness.admit(document)
        await harness.play(document, 1, first=1)
    assert [manifest.step for manifest in await harness.history(document)] == [1, 0, -1]


@pytest.mark.parametrize(("change", "binds"), [({"ttl_seconds_after_finished": 60.0, "priority": 7}, 1), ({}, 2)])
async def test_only_an_edit_that_concerns_the_training_binds_the_agent_anew(harness, change, binds):
    document = job()
    change = change or {"training": document.spec.training.model_copy(update={"steps": 99})}
    async with harness.training(document):
        await harness.play(document, 1)
        await harness.admit(edited := changed(document, **change))
        await harness.admit(job("later"))  # bound by a look at the jobs that sees the edit too
        await harness.version(job("later"), 0)
        await harness.play(edited, 1, first=1)
    assert (await harness.record(document)).epoch == binds - 1


async def test_a_job_that_is_over_leaves_no_consumer_and_one_that_is_drained_does(harness):
    over, drained = job("over"), job("drained")
    async with harness.trainer():
        for document in (over, drained):
            await harness.admit(document)
            await harness.play(document, 1)
        await harness.admit(over, phase=Phase.SUCCEEDED)
        await harness.report(lambda report: report.bound == ("team-a.drained.uid-drained.policy@v1",))
    consumers = harness.server.stream(subjects.GROUPS).consumers
    assert list(consumers) == ["team-a_drained_policy_trainer"]
    await harness.admit(drained, phase=Phase.SUCCEEDED)
    async with harness.trainer("trainer-1"):
        await harness.admit(last := job("last"))
        await harness.play(last, 1)
        assert list(consumers) == ["team-a_last_policy_trainer"], "that of the drained one is deleted now"


async def test_what_is_kept_of_an_agent_is_dropped_a_minute_after_its_jobs_document(harness):
    document = job()
    async with harness.training(document), asyncio.timeout(WITHIN_S):
        await harness.report(lambda report: bool(report.agent_work))
        await (await harness.bus.bucket(subjects.JOBS)).delete(document.ref.key)
        found = await harness.report(lambda report: not report.bound)
        assert (document.uid in found.job_engine_s, list(found.agent_work)) == (True, [harness.policy_key(document)])
        harness.clock.at += KEPT_S + 1
        found = await harness.report(lambda report: document.uid not in report.job_engine_s)
        assert found.agent_work == {}
        await harness.admit(document)
        await harness.play(document, 1)


async def test_a_step_whose_messages_are_lost_with_the_connection_is_read_from_the_log(harness, monkeypatch):
    """The bus delivers them again a minute later, on a clock that stands still here."""
    document, fetch = job(maxStaleness=1), MemoryConsumer.fetch

    async def lossy(consumer, batch, timeout_s):
        found = [(one, wire.decode(one.stored.data)) for one in await fetch(consumer, batch, timeout_s)]
        return [one for one, message in found if not isinstance(message, GroupDecided | StepClosed) or message.step > 0]

    monkeypatch.setattr(MemoryConsumer, "fetch", lossy)
    async with harness.training(document):
        await harness.step(document, 0)
        await harness.assign(document, 1, [0, 1], base_version=1)
        await harness.close(document, 1, 2, base_version=1)
        await harness.version(document, 2)
    assert [manifest.step for manifest in await harness.history(document)] == [1, 0, -1]


async def test_messages_are_acked_once_their_step_is_committed_also_those_that_train_nothing(harness):
    document = job()
    async with harness.training(document):
        unused = GroupUnused(**identity(document), agent="policy", step=0, index=0, rewards=(1.0, 1.0))
        await harness.log(document, unused)
        await harness.close(document, 0, 0)
        await harness.assign(document, 1, [0])
        consumers = harness.server.stream(subjects.GROUPS).consumers
        await harness.until(lambda: len(consumers) > 0)
        (consumer,) = consumers.values()
        await harness.until(lambda: consumer.next_sequence > 3 and not consumer.pending.keys() & {1, 2})
        assert list(consumer.pending) == [3], "the group of the open step"
        await harness.assign(document, 1, [1])
        await harness.close(document, 1, 2)
        await harness.until(lambda: consumer.next_sequence > 5 and not consumer.pending)
        assert (await harness.record(document)).step == 1


async def test_a_new_job_of_an_old_name_begins_at_version_zero_and_hears_nothing_of_the_old(harness):
    old = job()
    new = old.model_copy(update={"uid": "uid-new", "seed": 4})
    await harness.admit(old)
    async with harness.trainer():
        await harness.play(old, 1)
        before = await harness.record(old)
        await harness.admit(new)
        await harness.play(new, 1)
    after = await harness.record(new)
    assert (after.version, after.step) == (1, 0)
    assert after.epoch > before.epoch
    assert (await harness.manifest(after.manifest)).consumed == ("uid-new-t0", "uid-new-t1")


async def test_an_outage_of_the_bus_costs_nothing_but_time(harness, caplog):
    document = job()
    async with harness.training(document):
        await harness.play(document, 1)
        await harness.assign(document, 1, [0, 1])
        harness.server.available = False
        for text in ("could not report", "no agent is bound or released"):
            await harness.until(lambda text=text: text in caplog.text)
        harness.server.available = True
        await harness.close(document, 1, 2)
        await harness.version(document, 2)
    assert (await harness.record(document)).epoch == 0
