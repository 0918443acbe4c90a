"""A preempted job stops at a step boundary, resumes as if nothing had happened, and is not charged for what was cut."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.harness import changed, working
from tests.killing import kill_at
from tests.orchestrator.harness import OrchestratorHarness, final, mixed
from tests.orchestrator.test_admission import moved

from marlaas_api import subjects
from marlaas_api.messages import JobDocument, Meter, Phase, Progress, StepRecord, TaskMessage, UsageAmounts
from marlaas_api.wire import decode_as
from marlaas_worker.orchestrator import issuing, preemption
from marlaas_worker.orchestrator.job_tasks import JobTasks


class OneJobAtATime(OrchestratorHarness):
    """An engine whose KV cache one job fills, and that reports the tokens which it has generated, and which a preemption cut."""

    meter, turn_bytes = Meter(prompt_tokens=20, cached_tokens=16, output_tokens=5, share_s=0.5), 8

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self.cut: Counter[str] = Counter()

    async def put_report(self, role: str = "rollout", replica: str = "rollout-0", **fields: Any) -> None:
        used = {"job_tokens": self.generated, "job_engine_s": seconds(self.generated)}
        cut = {"job_preempted_tokens": self.cut, "job_preempted_engine_s": seconds(self.cut)}
        await super().put_report(role, replica, **{**fields, "kv_tokens": 1, **used, **cut})

    async def charged(self, job: JobDocument) -> UsageAmounts:
        """The usage of a job that has ended, with what the engine reports last; without its time of admission."""
        await self.report(job, job.spec.training.steps)
        level = await self.progress(job, lambda level: level.phase.final and level.tokens >= self.generated[job.uid])
        return level.amounts.model_copy(update={"admitted_s": 0.0})


def seconds(tokens: Counter[str]) -> dict[str, float]:
    return {uid: number / 10 for uid, number in tokens.items()}


async def another(scratch: Path) -> OneJobAtATime:
    made = OneJobAtATime(scratch)
    await made.bus.ensure()
    return made


@pytest.fixture
async def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneJobAtATime:
    """A harness in which jobs may be preempted as soon as they run."""
    monkeypatch.setattr(preemption, "MIN_RUN_S", 0.0)
    return await another(tmp_path)


def workers(harness, document, *, sandbox=True):
    return working(harness.train(document), *([harness.play(document, mixed)] if sandbox else []))


def heavy(document: JobDocument) -> JobDocument:
    """A job of a tenant of weight 2: in a pool of one job, its share is half of that of a tenant of weight 1."""
    return moved(document, "team-b").model_copy(update={"job": "other", "tenant_weight": 2.0})


async def outweighed(harness: OrchestratorHarness, job: JobDocument, other: JobDocument) -> None:
    """Submit the other job in the middle of the third step; the trainer waits until the orchestrator has decided."""
    await harness.progress(job, lambda level: level.step >= 2)
    await harness.submit(other)
    await harness.progress(other, lambda level: level.reason == "WaitingForMemory")
    harness.may_train.set()


async def undisturbed(scratch: Path, job: JobDocument) -> tuple[OneJobAtATime, UsageAmounts]:
    harness = await another(scratch / "undisturbed")
    await harness.report(job, -1)
    async with harness.orchestrating(), workers(harness, job):
        await harness.submit(job)
        await harness.progress(job, final)
        return harness, await harness.charged(job)


async def until_preempted(harness: OrchestratorHarness, job: JobDocument) -> Progress:
    return await harness.progress(job, lambda level: level.reason == "Preempted")


def said(steps: list[StepRecord]) -> list[tuple[object, ...]]:
    return [(s.step, s.outcome, s.version, s.indices, s.reward_mean, s.num_groups) for s in steps]


@pytest.mark.parametrize("agents", [(), ({"name": "a"}, {"name": "b"})])
async def test_a_strict_job_trains_the_same_steps_whether_it_was_preempted_or_not(harness, document, tmp_path, agents):
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


async def issued_again(harness: OrchestratorHarness) -> None:
    """Wait until only tasks that were issued after the preemption are in the queue."""

    async def queued() -> set[int]:
        stored = await harness.bus.replay(subjects.TASKS, subjects.task("*", "*"))
        return {decode_as(TaskMessage, one.data).num_preemptions for one in stored}

    while await queued() != {1}:
        await harness.server.change(0.02, None)


async def test_what_was_cut_is_played_after_the_next_admission_and_is_free(harness, document, tmp_path, monkeypatch):
    """The orchestrator is killed before it removes the tasks of the preempted job."""
    monkeypatch.setattr(issuing, "DRAIN_S", 0.0)
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
    without_cut = {"generated_tokens": charged.charged_tokens, "engine_s": charged.charged_engine_s}
    without_cut |= {"preempted_tokens": 0, "preempted_engine_s": 0.0}
    assert charged.model_copy(update=without_cut) == usage + failed
    assert (charged.preempted_tokens, charged.preempted_engine_s) == (2 * 5 + 20, 3.0)
    assert harness.deaths == ["orchestrator.preempt.after_progress"]
    assert sorted(harness.trained) == sorted(alone.trained)
