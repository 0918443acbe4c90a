"""What a job leaves in the streams: what recovery and readers need, and no more, however long it runs; nothing that is live is ever lost."""

import asyncio
from dataclasses import replace

from tests.orchestrator.stage import final, mixed, running
from tests.orchestrator.test_taking_up import working

from marlaas_api import subjects
from marlaas_api.messages import Phase

TURN_BYTES = 1000


async def shrink(stage, max_bytes: int) -> None:
    """A stream of turns that holds this much."""
    (spec,) = [spec for spec in subjects.STREAMS if spec.name == subjects.TURNS]
    stage.server.streams[subjects.TURNS].spec = replace(spec, max_bytes=max_bytes)


async def turns_of(stage, job) -> list[str]:
    return [one.subject for one in await stage.bus.replay(subjects.TURNS, subjects.turn("team-a", job.job, "*", "*"))]


async def test_a_neighbours_turns_never_push_out_those_of_a_job_that_waits_for_its_trainer(stage, document):
    stage.turn_bytes = TURN_BYTES
    slow, busy = document("slow", maxStaleness=1), document("busy", steps=40)
    stage.may_train.clear()
    async with running(stage, slow, mixed):
        await stage.progress(slow, lambda level: level.num_outstanding == 4 and level.eval_last is not None)
        await shrink(stage, 40 * TURN_BYTES)
        always = asyncio.Event()
        always.set()
        async with working(stage.play(busy, mixed), stage.train(busy, always)):
            await stage.submit(busy)
            level = await stage.progress(busy, final)
        assert (level.phase, level.step) == (Phase.SUCCEEDED, 40)
        stage.may_train.set()
        level = await stage.progress(slow, final)
    assert (level.phase, level.step) == (Phase.SUCCEEDED, 3)


async def test_turns_are_forgotten_once_their_step_is_on_record(stage, document):
    stage.turn_bytes = TURN_BYTES
    job, most = document(steps=30), 0
    async with running(stage, job, mixed):
        for step in range(30):
            await stage.progress(job, lambda level, step=step: level.step >= step)
            most = max(most, len(await turns_of(stage, job)))
        await stage.progress(job, final)
    assert most <= 3 * 4 + 2, "of two groups of two a step: the open step, the one before it, an evaluation"


async def test_groups_of_steps_on_record_are_forgotten(stage, document):
    job = document(steps=30, maxStaleness=1)
    async with running(stage, job, mixed):
        await stage.progress(job, final)
    log = await stage.bus.replay(subjects.GROUPS, subjects.group("team-a", job.job, "policy"))
    assert len(log) == 1, "the last message stays: it is what the next compare-and-set names"
