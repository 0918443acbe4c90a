"""Life and end of a job, as its trainer sees them."""

import pytest
from tests.harness import changed, identity
from tests.trainer.harness import job

from marlaas_api import subjects, wire
from marlaas_api.bus_memory.consumers import MemoryConsumer
from marlaas_api.messages import GroupLogEntry, GroupUnused, Phase


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


async def test_a_step_whose_messages_are_lost_with_the_connection_is_read_from_the_log(harness, monkeypatch):
    """The bus delivers them again a minute later, on a clock that stands still here."""
    document, fetch = job(maxStaleness=1), MemoryConsumer.fetch

    async def lossy(consumer, batch, timeout_s):
        found = [(one, wire.decode(one.stored.data)) for one in await fetch(consumer, batch, timeout_s)]
        return [one for one, message in found if not isinstance(message, GroupLogEntry) or message.step > 0]

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
        await harness.log(
            document, GroupUnused(**identity(document), agent="policy", step=0, index=0, rewards=(1.0, 1.0))
        )
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
