"""Requests that end otherwise than by a result: at their deadline, or when the replica stops."""

import asyncio

from marlaas_api import subjects
from marlaas_api.messages import ReplyPhase
from marlaas_worker.rollout import requests, service


async def test_a_request_fails_at_its_deadline_and_says_what_it_was_at(harness, shut_engine):
    _, job = await harness.serving(shut_engine)
    await harness.verified("rollout-0", job.adapter(0))
    reply = await harness.ask(job.request(deadline_s=2.0))
    assert (reply.phase, reply.retryable) == (ReplyPhase.FAILED, True)
    assert "passed while it was being generated" in reply.error
    await shut_engine.aborted.wait()


async def test_asking_again_prolongs_the_deadline(harness, shut_engine):
    _, job = await harness.serving(shut_engine)
    impatient = job.request(index=1, deadline_s=1.0)
    async with (
        harness.asking(job.request(deadline_s=1.0)) as asked,
        harness.asking(job.request()),
        harness.asking(impatient) as one,
    ):
        assert (await one.end()).phase is ReplyPhase.FAILED
        shut_engine.open.set()
        assert (await asked.end()).phase is ReplyPhase.RESULT


async def test_a_request_lives_on_while_its_sandbox_says_that_it_waits(harness, shut_engine, monkeypatch):
    _, job = await harness.serving(shut_engine)
    await harness.verified("rollout-0", job.adapter(0))
    monkeypatch.setattr(requests, "MAX_DEADLINE_S", 1.0)
    async with harness.asking(job.request()) as kept, harness.asking(job.request(index=1)) as forgotten:
        await forgotten.until(ReplyPhase.ACCEPTED)
        monkeypatch.setattr(requests, "MAX_DEADLINE_S", 3600.0)
        async with harness.asking(job.keep()):
            ended = await forgotten.end()
        assert (ended.phase, ended.retryable, ended.waits) == (ReplyPhase.FAILED, True, True)
        shut_engine.open.set()
        assert (await kept.end()).phase is ReplyPhase.RESULT


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
    assert (await harness.ask(job.request())).phase is ReplyPhase.RESULT


async def test_an_agent_without_a_version_is_named_at_the_deadline(harness):
    _, job = await harness.serving(agents=[{"name": "policy"}, {"name": "critic"}])
    reply = await harness.ask(job.request(agent="critic", turn=1, deadline_s=0.1))
    assert (reply.retryable, "no version of agent critic was verified yet" in reply.error) == (True, True)


async def test_a_record_that_the_bus_does_not_take_waits_and_is_not_generated_again(harness, shut_engine):
    _, job = await harness.serving(shut_engine)
    async with harness.asking(job.request()) as asked:
        await shut_engine.called.wait()
        harness.server.available = False
        shut_engine.open.set()
        failing = asyncio.get_running_loop().create_task(asked.end())
        while not harness.server.available:
            await harness.server.change(0.3, None)
            harness.server.available = True
        assert (await failing).phase is ReplyPhase.RESULT
    assert len(shut_engine.calls) == 1


async def test_a_stopping_replica_ends_what_it_began_and_takes_nothing_new(harness, shut_engine):
    replica, job = await harness.serving(shut_engine)
    async with harness.asking(job.request()) as asked:
        await shut_engine.called.wait()
        replica.context.stop.set()
        await harness.report("rollout-0", lambda report: not report.ready)
        refused = await harness.ask(job.request(index=1), of="rollout-0")
        assert (refused.phase, refused.retryable, refused.waits) == (ReplyPhase.FAILED, True, True)
        shut_engine.open.set()
        assert (await asked.end()).phase is ReplyPhase.RESULT
        await replica.task
    assert await (await harness.bus.bucket(subjects.REPLICAS)).entries() == []
    assert not await shut_engine.healthy()


async def test_what_does_not_end_in_time_is_handed_back(harness, shut_engine, monkeypatch):
    monkeypatch.setattr(service, "DRAIN_S", 0.05)
    replica, job = await harness.serving(shut_engine)
    async with harness.asking(job.request()) as asked:
        await shut_engine.called.wait()
        await replica.stop()
        reply = await asked.end()
    assert (reply.retryable, reply.waits) == (True, True)
    assert "is stopping while it was being generated" in reply.error
