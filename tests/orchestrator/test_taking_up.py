"""What an orchestrator makes of a job that another one has left half-way, perhaps long ago."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from tests.orchestrator.harness import OrchestratorHarness, a_turn, final, mixed

from marlaas_api import subjects
from marlaas_api.messages import (
    Episode,
    GroupReady,
    JobDocument,
    Phase,
    Pin,
    PolicyRecord,
    TaskMessage,
)
from marlaas_api.names import Split, episode_id, eval_group, train_group
from marlaas_api.wire import decode_as, encode


@contextlib.asynccontextmanager
async def working(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def given_out(harness: OrchestratorHarness, job: JobDocument) -> AsyncIterator[None]:
    """A job whose first groups are in the queue, and whose orchestrator is gone; its trainer lives."""
    await harness.report(job, -1)
    await harness.submit(job)
    async with working(harness.train(job)):
        async with working(harness.orchestrate()):
            name, subject = subjects.consumer("team-a", job.job, "sandbox"), subjects.task("team-a", job.job)
            queue = await harness.bus.consumer(subjects.TASKS, name, subject)
            training = job.spec.training
            for _ in range(training.groups_per_step * (1 + training.max_staleness) + job.spec.evaluation.tasks):
                (delivery,) = await queue.fetch(1, 30.0)
                await delivery.nak(1.0)
        yield


async def played(harness: OrchestratorHarness, job: JobDocument, group: str, member: int, version: int) -> None:
    """A member of a group has ended: one turn, sampled from this version, and its episode."""
    episode = episode_id(group, member, 1)
    names = {
        "namespace": "team-a",
        "job": job.job,
        "uid": job.uid,
        "group": group,
        "member": member,
        "episode": episode,
    }
    turn = a_turn(job.job, job.uid, group, member, version=version)
    await harness.bus.publish(subjects.turn("team-a", job.job, episode, 0), encode(turn))
    rewards, leaves = {"policy": float(member)}, {"policy": (0,)}
    ended = Episode(**names, split=Split.TRAIN, index=0, rewards=rewards, leaves=leaves)
    await harness.bus.publish(subjects.episode("team-a", job.job), encode(ended))


async def first_group(harness: OrchestratorHarness, job: JobDocument) -> GroupReady:
    consumer = await harness.bus.consumer(subjects.GROUPS, "reader", subjects.group("team-a", job.job, "policy"))
    (delivery, *_) = await consumer.fetch(1, 30.0)
    return decode_as(GroupReady, delivery.stored.data)


async def pinned_again(harness: OrchestratorHarness, key: str) -> int:
    """Forget a pin, and wait until it is made anew; its version."""
    pins = await harness.bus.bucket(subjects.PINS)
    await pins.delete(key)
    async with asyncio.timeout(30), pins.watch() as entries:
        async for entry in entries:
            if entry.key == key and entry.data is not None:
                return decode_as(Pin, entry.data).version
    raise AssertionError("the watch ended")


async def test_what_the_queue_still_holds_is_not_put_there_again(harness, document):
    job, plays = document(steps=2, maxStaleness=1), Counter()

    def counted(task: TaskMessage, member: int) -> float:
        plays[task.group, member] += 1
        return mixed(task, member)

    async with given_out(harness, job):
        harness.server.clock = lambda: time.monotonic() + 121  # longer than the queue remembers what it was given
        await harness.report(job, 0)
        async with working(harness.orchestrate()):
            await pinned_again(harness, subjects.pin_key("team-a", job.job, "policy", eval_group(job.ref, 1, 0)))
            async with working(harness.play(job, counted)):
                level = await harness.progress(job, final)
    assert level.phase is Phase.SUCCEEDED
    assert set(plays.values()) == {1}


async def test_a_group_half_played_keeps_its_version_although_its_pin_has_expired(harness, document):
    job = document(maxStaleness=1)
    group = train_group(job.ref, 0)
    async with given_out(harness, job):
        await played(harness, job, group, 0, version=0)
        await harness.commit(job, PolicyRecord(uid=job.uid, version=0), None, ())
        async with working(harness.orchestrate()):
            await harness.progress(job, lambda level: level.versions == {"policy": 1})
            await played(harness, job, group, 1, version=0)
            ready = await first_group(harness, job)
    assert (ready.group, ready.version, ready.base_version) == (group, 0, 1)


async def test_a_strict_group_still_in_the_queue_is_pinned_again_when_its_pin_has_expired(harness, document):
    job = document(maxStaleness=0)
    key = subjects.pin_key("team-a", job.job, "policy", train_group(job.ref, 0))
    async with given_out(harness, job), working(harness.orchestrate()):
        assert await pinned_again(harness, key) == 0
