"""Requests that end otherwise than by a result: at their deadline, or when the replica stops."""

import asyncio

import pytest

from marlaas_api import subjects
from marlaas_api.messages import ReplyPhase


async def test_a_request_fails_at_its_deadline_unless_it_is_asked_again_or_its_sandbox_says_that_it_waits(
    harness, shut_engine
):
    _, job = await harness.serving(shut_engine)
    await harness.verified("rollout-0", job.adapter(0))
    asked_again, at = job.request(index=1), asyncio.get_running_loop().time
    async with (
        harness.asking(job.request()) as kept,
        harness.asking(asked_again) as again,
        harness.asking(job.request(index=2)) as forgotten,
    ):
        due = at() + job.request().deadline_s
        await asyncio.sleep(due - at() - 1.0)
        async with harness.asking(job.keep()), harness.asking(asked_again):
            ended = await forgotten.end()
        assert (ended.phase, ended.retryable, ended.waits, at()) == (ReplyPhase.FAILED, True, True, due)
        assert "passed while it was being generated" in ended.error
        await shut_engine.aborted.wait()
        await asyncio.sleep(30.0)
        shut_engine.open.set()
        assert (await kept.end()).phase is (await again.end()).phase is ReplyPhase.RESULT


async def test_a_cancelled_request_may_be_asked_for_again_and_kept_before_it_has_ended(harness, shut_engine, roles):
    _, job = await harness.serving(shut_engine)
    await harness.verified("rollout-0", job.adapter(0))
    async with harness.asking(job.request()) as asked:
        await shut_engine.called.wait()
        requests = roles[0]._requests
        (cancelled,) = requests._running
        requests.cancel(job.cancel())
        await requests.accept(job.request(), "_INBOX.again")
        while cancelled in requests._running:
            requests.keep(job.keep())
            await asyncio.sleep(0)
        shut_engine.open.set()
        await harness.until(lambda: not requests._running)
    assert await harness.turn(job.request()) is not None
    assert asked.without_heartbeats == [ReplyPhase.ACCEPTED]


async def test_a_request_that_is_just_being_dropped_may_be_asked_for_again(harness, shut_engine, monkeypatch):
    dropped, let_go = asyncio.Event(), shut_engine._let_go

    async def slowly() -> None:
        try:
            await let_go()
        except asyncio.CancelledError:
            await dropped.wait()
            raise

    monkeypatch.setattr(shut_engine, "_let_go", slowly)
    _, job = await harness.serving(shut_engine)
    await harness.verified("rollout-0", job.adapter(0))
    async with harness.asking(job.request(deadline_s=0.5)) as first:
        await shut_engine.aborted.wait()
        async with harness.asking(job.keep()), harness.asking(job.request()) as again:
            await again.until(ReplyPhase.ACCEPTED)
            dropped.set()
            assert ((await first.end()).waits, (await again.end()).waits) == (True, True)
    shut_engine.open.set()
    await harness.result(job.request())


async def test_an_agent_without_a_version_is_named_at_the_deadline(harness):
    _, job = await harness.serving(agents=[{"name": "policy"}, {"name": "critic"}])
    reply = await harness.ask(job.request(agent="critic", turn=1, deadline_s=0.1))
    assert (reply.retryable, "no version of agent critic was verified yet" in reply.error) == (True, True)


@pytest.mark.parametrize("ends_in_time", [True, False])
async def test_a_stopping_replica_takes_nothing_new_and_hands_back_what_does_not_end_in_time(
    harness, shut_engine, ends_in_time
):
    replica, job = await harness.serving(shut_engine)
    async with harness.asking(job.request()) as asked:
        await shut_engine.called.wait()
        replica.context.stop.set()
        await harness.report("rollout-0", lambda report: not report.ready)
        refused = await harness.failure(job.request(index=1))
        assert (refused.retryable, refused.waits) == (True, True)
        if ends_in_time:
            shut_engine.open.set()
        reply = await asked.end()
        await replica.task
    if ends_in_time:
        assert reply.phase is ReplyPhase.RESULT
    else:
        assert (reply.retryable, reply.waits) == (True, True)
        assert "is stopping while it was being generated" in reply.error
    assert await (await harness.bus.bucket(subjects.REPLICAS)).entries() == []
    assert not await shut_engine.healthy()
