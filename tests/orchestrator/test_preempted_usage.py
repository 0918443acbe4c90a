"""The usage of plays that a preemption cuts is not charged, whether or not they are played again."""

import asyncio
from pathlib import Path

import pytest
from tests.harness import changed
from tests.killing import kill_at
from tests.orchestrator.harness import OrchestratorHarness, final, mixed
from tests.orchestrator.preempting import (
    OneJobAtATime,
    deleted,
    heavy,
    preempting,
    undisturbed,
    until_preempted,
    workers,
)
from tests.orchestrator.remains import is_forgotten

from marlaas_api import subjects
from marlaas_api.blobs import BlobUnavailable
from marlaas_api.bus import BusUnavailable
from marlaas_api.messages import (
    Phase,
    TaskMessage,
    TenantUsage,
    UsageAmounts,
)
from marlaas_api.wire import decode_as
from marlaas_worker.orchestrator import giving_way
from marlaas_worker.orchestrator.job_tasks import JobTasks
from marlaas_worker.orchestrator.metering import Metering
from marlaas_worker.orchestrator.owned_job import OwnedJob


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneJobAtATime:
    return await preempting(tmp_path, monkeypatch)


async def issued_again(harness: OrchestratorHarness) -> None:
    """Wait until only tasks that were issued after the preemption are in the queue."""

    async def queued() -> set[int]:
        stored = await harness.bus.replay(subjects.TASKS, subjects.task("*", "*"))
        return {decode_as(TaskMessage, one.data).num_preemptions for one in stored}

    while await queued() != {1}:
        await harness.server.change(0.02, None)


def without_cut(used: UsageAmounts) -> UsageAmounts:
    """The charged part of a usage."""
    charged = {"generated_tokens": used.charged_tokens, "engine_s": used.charged_engine_s}
    return used.model_copy(update={**charged, "preempted_tokens": 0, "preempted_engine_s": 0.0})


async def test_what_is_not_finished_in_time_is_played_after_the_next_admission_and_what_was_cut_is_not_charged(
    harness, document, tmp_path, monkeypatch
):
    """The orchestrator is killed before it removes the tasks of the preempted job."""
    monkeypatch.setattr(giving_way, "DRAIN_S", 0.0)
    kill_at("orchestrator.preempt.after_progress")
    job, other = document(steps=3), heavy(document())
    alone, usage = await undisturbed(tmp_path, job)
    task = JobTasks(job).train(0)
    await harness.report(job, -1)
    async with harness.orchestrating():
        await harness.submit(job)
        async with workers(harness, job, sandbox=False):
            await harness.progress(job, lambda level: level.num_outstanding > 0)
            await harness.play_member(job, task, 0, mixed)
            await harness.record_turn(task, 1)  # this attempt fails by itself
            for turn in (0, 1):
                await harness.record_turn(task, 1, attempt=2, turn=turn)
            await harness.report(job, 0)
            await harness.progress(job, lambda level: level.tokens > 0)
            await harness.submit(other)
            level = await until_preempted(harness, job)
            assert level.step == 0
            harness.generated[job.uid] += 20  # the next turn of the second attempt is cancelled
            harness.cut[job.uid] += 20
            await harness.progress(other, lambda level: level.admitted)
            await harness.submit(changed(other, suspend=True))
            await harness.progress(job, lambda level: level.admitted)
            await issued_again(harness)
            player = asyncio.create_task(harness.play(job, mixed))
            assert (await harness.progress(job, final)).phase is Phase.SUCCEEDED
            charged = await harness.charged(job)
            player.cancel()
    failed = UsageAmounts(prompt_tokens=20, cached_tokens=16, generated_tokens=5, failed_tokens=5, engine_s=0.5)
    assert without_cut(charged) == usage + failed
    assert (charged.preempted_tokens, charged.preempted_engine_s) == (2 * 5 + 20, 3.0)
    assert harness.deaths == ["orchestrator.preempt.after_progress"]
    assert sorted(harness.trained) == sorted(alone.trained)


class Fails:
    """In place of a method of an owned job's parts."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def __call__(self, *_: object) -> UsageAmounts:
        raise self._error


async def hears_nothing(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("hears", [True, False])
async def test_of_a_preempted_job_that_is_deleted_what_was_cut_is_not_charged(harness, document, monkeypatch, hears):
    """hears: whether the job's loop has read the Episode of the member that has ended."""
    monkeypatch.setattr(giving_way, "DRAIN_S", 0.0)
    if not hears:
        monkeypatch.setattr(OwnedJob, "_listen", hears_nothing)
    job, other = document(steps=3), heavy(document())
    task = JobTasks(job).train(0)
    await harness.report(job, -1)
    async with harness.orchestrating():
        await harness.submit(job)
        async with workers(harness, job, sandbox=False):
            await harness.progress(job, lambda level: level.num_outstanding > 0)
            await harness.play_member(job, task, 0, mixed)
            for turn in (0, 1):
                await harness.record_turn(task, 1, turn=turn)
            await harness.report(job, 0)
            await harness.progress(job, lambda level: level.tokens == 15)
            await harness.submit(other)
            amounts = (await until_preempted(harness, job)).amounts
        assert (amounts.preempted_tokens, amounts.open_tokens, amounts.charged_engine_s) == (10, 5, 0.5)
        await harness.progress(other, lambda level: level.admitted)
        await harness.submit(deleted(job))
        await is_forgotten(harness, job)
        account = await harness.get(TenantUsage, subjects.TENANTS, subjects.tenant_usage_key(job.tenant))
    assert (account.removed.generated_tokens, account.removed.charged_tokens) == (15, 5)
    assert (account.removed.engine_s, account.removed.charged_engine_s) == (1.5, 0.5)


@pytest.mark.parametrize(
    "error", [BlobUnavailable("the store is away"), BusUnavailable("NATS is away"), TimeoutError()]
)
async def test_a_job_is_preempted_also_if_what_that_cuts_cannot_be_read(harness, document, monkeypatch, error):
    monkeypatch.setattr(giving_way, "DRAIN_S", 0.0)
    monkeypatch.setattr(Metering, "of_cut_plays", Fails(error))
    job, other = document(steps=3), heavy(document())
    await harness.report(job, -1)
    async with harness.orchestrating(), workers(harness, job, sandbox=False):
        await harness.submit(job)
        await harness.progress(job, lambda level: level.num_outstanding > 0)
        await harness.record_turn(JobTasks(job).train(0), 1)
        await harness.submit(other)
        level = await until_preempted(harness, job)
        await harness.progress(other, lambda level: level.admitted)
    assert (level.num_preemptions, level.cut_tokens) == (1, 0)
