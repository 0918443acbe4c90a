"""What a job leaves in the streams: what recovery and readers need, and no more, however long it runs; nothing that is live is ever lost."""

import asyncio
from dataclasses import replace

from tests.harness import working
from tests.killing import kill_at
from tests.orchestrator.harness import final, mixed, running

from marlaas_api import subjects
from marlaas_api.messages import JobVerdict, Phase

TURN_BYTES = 1000


async def test_a_neighbours_turns_never_push_out_those_of_a_job_that_waits_for_its_trainer(harness, document):
    harness.turn_bytes = TURN_BYTES
    slow, busy = document("slow", maxStaleness=1), document("busy", steps=40)
    harness.may_train.clear()
    async with running(harness, slow, mixed):
        await harness.progress(slow, lambda level: level.num_outstanding == 4 and level.eval_last is not None)
        turns = harness.server.streams[subjects.TURNS]
        turns.spec = replace(turns.spec, max_bytes=40 * TURN_BYTES)
        always = asyncio.Event()
        always.set()
        async with working(harness.play(busy, mixed), harness.train(busy, always)):
            await harness.submit(busy)
            level = await harness.progress(busy, final)
        assert (level.phase, level.step) == (Phase.SUCCEEDED, 40)
        harness.may_train.set()
        level = await harness.progress(slow, final)
    assert (level.phase, level.step) == (Phase.SUCCEEDED, 3)


async def test_turns_are_forgotten_once_their_step_is_on_record(harness, document):
    harness.turn_bytes = TURN_BYTES
    job, most = document(steps=30), 0
    async with running(harness, job, mixed):
        for step in range(30):
            await harness.progress(job, lambda level, step=step: level.step >= step)
            turns = await harness.bus.replay(subjects.TURNS, subjects.turn("team-a", job.job, "*", "*"))
            most = max(most, len(turns))
        await harness.progress(job, final)
    assert most <= 3 * 4 + 2, "of two groups of two a step: the open step, the one before it, an evaluation"


async def test_a_failed_job_leaves_no_tasks_although_a_kill_follows_its_last_progress(harness, document):
    job = document(maxStaleness=1)
    harness.withheld = range(1000)
    passed = kill_at("orchestrator.end.after_progress")
    async with running(harness, job, mixed):
        await harness.progress(job, lambda level: level.num_outstanding == 4)
        assert await harness.bus.replay(subjects.TASKS, subjects.task("team-a", job.job))
        why = JobVerdict(reason="PoolRemoved", message="the pool tiny is gone")
        await harness.submit(job.model_copy(update={"verdict": why, "generation": 2}))
        level = await harness.progress(job, final)
        queued = harness.server.stream(subjects.TASKS).by_subject
        await harness.until(lambda: not queued.get(subjects.task("team-a", job.job)))
    assert (level.phase, passed.count("orchestrator.end.after_progress")) == (Phase.FAILED, 1)
