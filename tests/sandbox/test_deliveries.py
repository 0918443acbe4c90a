"""Deliveries of a task: which count, and what becomes of a task that has had too many."""

import asyncio

import pytest
from tests.harness import WITHIN_S

from marlaas_api import subjects, wire
from marlaas_api.messages import FaultClass
from marlaas_worker.sandbox.attempt import MAX_DELIVERIES


async def test_attempts_go_on_counting_over_deliveries_and_preemptions_and_ended_members_are_not_played(harness):
    document = harness.document("rogues:asks", max_attempts=3)
    await harness.bus.ensure()
    issued = {"num_preemptions": 2, "ended": (0,)}
    await harness.put_task(harness.task(document, group_size=2).model_copy(update=issued))
    consumer = await harness.open_tasks()
    (delivery,) = await consumer.fetch(1, 1.0)
    await delivery.nak()
    async with harness.open(document):
        (episode,) = await harness.episodes(1)
    assert await harness.num_tasks() == 0
    assert episode.episode == "u1-t0-1-2000004"
    assert len(await harness.bus.replay(subjects.EPISODES, "episode.*.*")) == 1


async def test_a_task_that_kills_every_sandbox_is_given_up(harness):
    document = harness.document("rogues:asks", max_attempts=1)
    await harness.bus.ensure()
    await harness.put_task(harness.task(document, group_size=2))
    consumer = await harness.open_tasks()
    for _ in range(MAX_DELIVERIES):
        (delivery,) = await consumer.fetch(1, 1.0)
        await delivery.nak()
    async with harness.open(document):
        episodes = await harness.episodes(2)
    assert await harness.num_tasks() == 0
    assert [episode.fault for episode in episodes] == [FaultClass.INFRA] * 2
    assert "never finished" in episodes[0].fault_text


@pytest.mark.parametrize("is_next_job", [False, True], ids=["a task", "the document of the next job of the name"])
async def test_a_task_of_a_newer_release_is_claimed_once_and_left_to_newer_sandboxes(harness, monkeypatch, is_next_job):
    document = harness.document("rogues:asks")
    latest = document.model_copy(update={"uid": "u2"}) if is_next_job else document
    task = wire.encode(harness.task(latest))
    await harness.bus.ensure()
    with monkeypatch.context() as newer:
        newer.setattr(wire, "SCHEMA_VERSION", wire.SCHEMA_VERSION + 1)
        await harness.submit(latest)
        task = task if is_next_job else wire.encode(harness.task(latest))
    async with harness.open(document) as context:
        for is_ready in (True, False):
            async with asyncio.timeout(WITHIN_S):
                while context.metrics.ready() != is_ready:  # noqa: ASYNC110 (a metric sets no event)
                    await asyncio.sleep(0.01)
            if is_ready:
                await harness.bus.publish("task.team-a.job", task)
        (delivery,) = await (await harness.open_tasks()).fetch(1, WITHIN_S)
        assert delivery.num_delivered == 2
