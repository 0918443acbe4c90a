"""Several trainers share the agents of a pool, by one function that each of them computes."""

import asyncio
import contextlib

import pytest
from tests.harness import WITHIN_S
from tests.trainer.harness import TrainerHarness, job

from marlaas_api import subjects
from marlaas_api.bus import BusRefused
from marlaas_api.bus_memory import MemoryBus
from marlaas_api.bus_memory.buckets import MemoryBucket
from marlaas_api.messages import Phase
from marlaas_worker.reporter import Reporter
from marlaas_worker.trainer.commit import PolicyKey


def jobs(num):
    return [job(f"job-{number}") for number in range(num)]


async def bound(harness, name, num):
    return (await harness.report(lambda found: len(found.bound) == num, name)).bound


async def alone(harness, folder, document, steps):
    other = TrainerHarness(harness.model, folder, harness.sampler)
    await other.bus.ensure()
    (adapter,) = await other.trained(document, steps=steps)
    return adapter


async def test_a_trainer_that_joins_takes_over_its_share_and_each_agent_ends_where_it_ends_alone(harness, tmp_path):
    documents = jobs(4)
    for document in documents:
        await harness.admit(document)
    async with harness.trainer(), asyncio.timeout(WITHIN_S):
        for document in documents:
            await harness.play(document, 1)
        await bound(harness, "trainer-0", 4)
        async with harness.trainer("trainer-1"):
            mine, others = await bound(harness, "trainer-0", 2), await bound(harness, "trainer-1", 2)
            assert not {name.partition("@")[0] for name in mine} & {name.partition("@")[0] for name in others}
            for document in documents:
                await harness.play(document, 1, first=1)
            trainers = [manifest.trainer for document in documents for manifest in await harness.history(document)]
            assert {trainers.count(name) for name in ("trainer-0", "trainer-1")} == {10, 2}
        await bound(harness, "trainer-0", 4)  # trainer-1 has released its leases; no grace period passes
    assert await harness.adapter(documents[0]) == await alone(harness, tmp_path, documents[0], 2)
    assert [(await harness.record(document)).holder for document in documents] == [""] * 4


@contextlib.asynccontextmanager
async def doomed_trainer(harness, monkeypatch):
    """The trainer `trainer-1`, which is killed at the end: a killed process releases and withdraws nothing."""

    async def dead(*_: object):
        pass

    doomed = asyncio.create_task(harness.serve(await harness.context("trainer-1")))
    await harness.report(lambda _: True, "trainer-1")
    yield
    with monkeypatch.context() as patched:
        for owner, name in ((PolicyKey, "release"), (Reporter, "withdraw"), (MemoryBus, "delete_consumer")):
            patched.setattr(owner, name, dead)
        doomed.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await doomed


@pytest.mark.parametrize("successor", ["trainer-1", "trainer-2"], ids=["restarted", "another"])
async def test_what_a_killed_trainer_has_left_of_a_job_that_ended_since_is_removed(harness, monkeypatch, successor):
    (document,) = jobs(1)
    async with asyncio.timeout(WITHIN_S):
        async with doomed_trainer(harness, monkeypatch):
            await harness.admit(document)
            await harness.play(document, 1)
        await harness.admit(document, phase=Phase.SUCCEEDED)
        consumers = harness.server.stream(subjects.GROUPS).consumers
        assert ((await harness.record(document)).holder, len(consumers)) == ("trainer-1", 1)
        async with harness.trainer(successor):
            clock = asyncio.create_task(harness.let_time_pass())
            await harness.committed(document, lambda record: not record.holder)
            clock.cancel()
    assert (len(consumers), (await harness.record(document)).version) == (0, 1)


async def test_what_the_bus_refuses_a_trainer_is_not_the_jobs_fault(harness, monkeypatch):
    document, read = job(), MemoryBucket.get_from_leader

    async def refuse(bucket, key):
        if key == subjects.policy_key("team-a", document.job, "policy"):
            raise BusRefused(f"no permission to read {key}")
        return await read(bucket, key)

    monkeypatch.setattr(MemoryBucket, "get_from_leader", refuse)
    await harness.admit(document)
    async with harness.trainer(), asyncio.timeout(WITHIN_S):
        found = await harness.report(lambda found: bool(found.refused))
        assert (found.refused, found.broken) == (("team-a.sums.policy",), {})
        assert "no permission to read" in (await harness.emitted(document, "BusRefused")).message
        monkeypatch.setattr(MemoryBucket, "get_from_leader", read)
        harness.clock.at += 1e7
        await harness.play(document, 1)
