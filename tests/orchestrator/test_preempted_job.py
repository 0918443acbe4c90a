"""A preempted job stops at a step boundary, is queued with the reason, and resumes as if nothing had happened."""

import asyncio
from pathlib import Path

import pytest
from tests.harness import changed
from tests.orchestrator.harness import OrchestratorHarness, final, mixed
from tests.orchestrator.preempting import (
    OneJobAtATime,
    deleted,
    heavy,
    outweighed,
    preempting,
    undisturbed,
    until_preempted,
    workers,
)
from tests.orchestrator.remains import all_there_is, is_forgotten

from marlaas_api.messages import (
    JobDocument,
    Phase,
    StepRecord,
)
from marlaas_worker.orchestrator import giving_way


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneJobAtATime:
    return await preempting(tmp_path, monkeypatch)


def said(steps: list[StepRecord]) -> list[tuple[object, ...]]:
    return [(s.step, s.outcome, s.version, s.indices, s.reward_mean, s.num_groups) for s in steps]


@pytest.mark.parametrize("agents", [(), ({"name": "a"}, {"name": "b"})])
async def test_a_strict_job_trains_the_same_groups_in_the_same_steps_whether_it_was_preempted_or_not(
    harness, document, tmp_path, agents
):
    job, other = document(steps=9, agents=agents), heavy(document())
    alone, usage = await undisturbed(tmp_path, job)
    harness.pause_after = 2 * len(job.spec.agents)
    await harness.report(job, -1)
    async with harness.orchestrating(), workers(harness, job):
        await harness.submit(job)
        await outweighed(harness, job, other)
        level = await until_preempted(harness, job)
        assert (level.phase, level.admitted) == (Phase.QUEUED, False)
        assert "preempted by tenant team-b (team-b/other), whose share is smaller" in level.message
        assert level.num_outstanding == 0, "it has stopped at a step boundary"
        at, trained = level.step, len(harness.trained)
        await harness.progress(other, lambda level: level.admitted)
        assert (await harness.progress(job, lambda level: True)).reason == "Preempted", "and not only for a moment"
        assert len(harness.trained) == trained
        await harness.submit(changed(other, suspend=True))
        level = await harness.progress(job, final)
        assert await harness.charged(job) == usage, "it is charged for nothing that it lost"
    assert (level.phase, level.step) == (Phase.SUCCEEDED, 9)
    assert 2 <= at < 9
    assert sorted(harness.trained) == sorted(alone.trained)
    assert said(await harness.steps(job)) == said(await alone.steps(job))


async def test_a_preempted_asynchronous_job_resumes_and_trains_no_group_twice(harness, document):
    job, other = document(steps=9, maxStaleness=2), heavy(document())
    harness.pause_after = 2
    await harness.report(job, -1)
    async with harness.orchestrating(), workers(harness, job):
        await harness.submit(job)
        await outweighed(harness, job, other)
        await until_preempted(harness, job)
        await harness.progress(other, lambda level: level.admitted)
        await harness.submit(changed(other, suspend=True))
        level = await harness.progress(job, final)
    assert (level.phase, level.step) == (Phase.SUCCEEDED, 9)
    groups = [group for _, names in harness.trained for group in names]
    assert len(groups) == len(set(groups)) == 18


async def test_a_job_goes_on_when_the_one_that_needed_its_place_has_gone_before_it_stopped(harness, document):
    job, other = document(steps=3), heavy(document())
    await harness.report(job, -1)
    async with harness.orchestrating():
        await harness.submit(job)
        async with workers(harness, job, sandbox=False):
            await harness.progress(job, lambda level: level.num_outstanding > 0)
            await harness.submit(other)
            await harness.progress(other, lambda level: level.reason == "WaitingForMemory")
            await harness.submit(changed(other, suspend=True))
            await harness.progress(other, lambda level: level.phase is Phase.SUSPENDED)
            player = asyncio.create_task(harness.play(job, mixed))
            level = await harness.progress(job, final)
            player.cancel()
    assert level.phase is Phase.SUCCEEDED


async def test_an_orchestrator_that_dies_while_a_job_stops_decides_again(harness, document, monkeypatch):
    job, other = document(steps=3), heavy(document())
    await harness.report(job, -1)
    async with workers(harness, job, sandbox=False):
        async with harness.orchestrating("one"):
            await harness.submit(job)
            await harness.progress(job, lambda level: level.num_outstanding > 0)
            await harness.submit(other)
            await harness.progress(other, lambda level: level.reason == "WaitingForMemory")
        assert (await harness.progress(job, lambda level: True)).admitted
        monkeypatch.setattr(giving_way, "DRAIN_S", 0.0)
        async with harness.orchestrating("two"):
            await until_preempted(harness, job)
            await harness.progress(other, lambda level: level.admitted)


async def left_of(harness: OrchestratorHarness, job: JobDocument) -> list[str]:
    """Everything that names the job."""
    return sorted(name for name in await all_there_is(harness) if job.ref.key in name or job.uid in name)


async def test_a_job_that_is_deleted_before_it_has_stopped_makes_room_at_once(harness, document):
    """Its groups are being played, so without the deletion it would be preempted only after the time to drain."""
    job, other = document(steps=3), heavy(document())
    await harness.report(job, -1)
    async with harness.orchestrating(), workers(harness, job, sandbox=False):
        await harness.submit(job)
        await harness.progress(job, lambda level: level.num_outstanding > 0)
        await harness.submit(other)
        await harness.progress(other, lambda level: level.reason == "WaitingForMemory")
        await harness.submit(deleted(job))
        await harness.progress(other, lambda level: level.admitted)
        await is_forgotten(harness, job)
        assert await left_of(harness, job) == []
