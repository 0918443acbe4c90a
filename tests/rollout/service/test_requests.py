import asyncio
import contextlib
from typing import Any

import pytest

from marlaas_api import subjects, wire
from marlaas_api.blobs import BlobRefused
from marlaas_api.messages import ReplyPhase
from marlaas_worker.rollout import requests, turn_log


async def test_a_request_asked_twice_is_generated_once_and_answered_twice(harness, shut_engine):
    _, job = await harness.serving(shut_engine)
    async with harness.asking(job.request()) as one, harness.asking(job.request()) as other:
        await other.until(ReplyPhase.ACCEPTED)
        shut_engine.open.set()
        assert (await one.end()).text == (await other.end()).text == "yes"
    assert len(shut_engine.calls) == 1


async def test_an_answered_request_is_answered_again_without_generating(harness):
    replica, job = await harness.serving()
    assert await harness.ask(job.request()) == await harness.ask(job.request())
    assert len(replica.engine.calls) == 1


async def test_a_turn_recorded_by_an_earlier_process_is_answered_from_its_record(harness):
    earlier, job = await harness.serving()
    await harness.ask(job.request())
    await earlier.kill()
    later = await harness.replica()
    reply = await harness.ask(job.request(), of="rollout-0")
    assert (reply.text, reply.num_tokens) == ("yes", 4)
    assert later.engine.calls == []


@pytest.mark.parametrize("changes", [{"append": "something else~"}, {"tools": ('{"name": "add"}',)}])
async def test_another_question_under_the_name_of_a_recorded_turn_is_refused(harness, changes):
    earlier, job = await harness.serving()
    first = await harness.ask(job.request())
    other = await harness.ask(job.request(**changes), of="rollout-0")
    assert (other.phase, other.retryable) == (ReplyPhase.FAILED, False)
    assert "recorded with another parent or text" in other.error
    await earlier.kill()
    later = await harness.replica()
    assert "another parent or text" in (await harness.ask(job.request(**changes), of="rollout-0")).error
    assert (await harness.ask(job.request())).text == first.text
    assert later.engine.calls == []


async def test_a_turn_that_the_blob_store_refuses_now_may_be_asked_for_again(harness, monkeypatch):
    async def refuse(self: Any, request: Any) -> None:
        raise BlobRefused("its token has expired")

    _, job = await harness.serving()
    with monkeypatch.context() as patch:
        patch.setattr(turn_log.Histories, "parent", refuse)
        failed = await harness.ask(job.request())
    assert (failed.phase, failed.retryable, failed.waits) == (ReplyPhase.FAILED, True, True)
    assert (await harness.ask(job.request())).phase is ReplyPhase.RESULT


async def test_two_questions_of_one_name_at_once_get_no_common_answer(harness, shut_engine):
    _, job = await harness.serving(shut_engine)
    async with harness.asking(job.request()) as one, harness.asking(job.request(append="something else~")) as other:
        await other.until(ReplyPhase.ACCEPTED)
        shut_engine.open.set()
        phases = {(await one.end()).phase, (await other.end()).phase}
    assert phases == {ReplyPhase.RESULT, ReplyPhase.FAILED}


async def test_a_job_with_too_much_text_under_way_may_ask_again_and_others_notice_nothing(
    harness, shut_engine, monkeypatch
):
    monkeypatch.setattr(requests, "MAX_CHARACTERS", 3)
    await harness.replica(engine=shut_engine)
    job, neighbour = await harness.job(), await harness.job("neighbour")
    async with harness.asking(job.request()) as first, harness.asking(neighbour.request()) as others:
        await first.until(ReplyPhase.ACCEPTED)
        refused = await harness.ask(job.request(index=1))
        assert (refused.phase, refused.retryable, refused.waits) == (ReplyPhase.FAILED, True, True)
        assert "too much text" in refused.error
        shut_engine.open.set()
        assert (await first.end()).phase is (await others.end()).phase is ReplyPhase.RESULT
    assert (await harness.ask(job.request(index=1))).phase is ReplyPhase.RESULT


async def test_a_job_with_too_many_requests_under_way_may_ask_again_however_short_they_are(
    harness, shut_engine, monkeypatch
):
    monkeypatch.setattr(requests, "MAX_CHARACTERS", 2 * requests._REQUEST_CHARACTERS)
    _, job = await harness.serving(shut_engine)
    async with harness.asking(job.request()) as first, harness.asking(job.request(index=1)) as second:
        await first.until(ReplyPhase.ACCEPTED)
        await second.until(ReplyPhase.ACCEPTED)
        refused = await harness.ask(job.request(index=2))
        assert (refused.phase, refused.retryable, refused.waits) == (ReplyPhase.FAILED, True, True)
        assert "too many requests" in refused.error
        shut_engine.open.set()
        assert (await first.end()).phase is (await second.end()).phase is ReplyPhase.RESULT
    assert (await harness.ask(job.request(index=2))).phase is ReplyPhase.RESULT


async def test_a_turn_that_is_asked_for_from_everywhere_is_answered_where_it_was_asked_for_last(
    harness, shut_engine, monkeypatch
):
    monkeypatch.setattr(requests, "MAX_INBOXES", 2)
    _, job = await harness.serving(shut_engine)
    async with (
        harness.asking(job.request()) as first,
        harness.asking(job.request()) as second,
        harness.asking(job.request()) as third,
    ):
        for asked in (first, second, third):
            await asked.until(ReplyPhase.ACCEPTED)
        shut_engine.open.set()
        assert (await second.end()).phase is (await third.end()).phase is ReplyPhase.RESULT
        assert ReplyPhase.RESULT not in {heard.phase for heard in first.heard}


async def test_of_two_replicas_that_play_one_turn_the_first_record_counts_for_both(harness, make_engine):
    engines = [make_engine(reply="yes~"), make_engine(reply="no~")]
    for number, engine in enumerate(engines):
        engine.open.clear()
        await harness.replica(f"rollout-{number}", engine)
    job = await harness.job()
    async with (
        harness.asking(job.request(), of="rollout-0") as one,
        harness.asking(job.request(), of="rollout-1") as other,
    ):
        await asyncio.gather(*(engine.called.wait() for engine in engines))
        engines[1].open.set()
        assert (await other.end()).text == "no"
        engines[0].open.set()
        assert (await one.end()).text == "no"
    assert len(await harness.bus.replay(subjects.TURNS, "turn.>")) == 1
    assert (await harness.turn(job.request())).replica == "rollout-1"


async def test_requests_go_to_the_owner_of_their_episode(harness):
    replicas = [await harness.replica(f"rollout-{number}") for number in range(2)]
    job = await harness.job()
    for replica in replicas:
        await harness.verified(replica.name, job.adapter(0))
    for index in range(8):
        await harness.ask(job.request(index=index))
        await harness.ask(job.request(index=index, turn=1))
    recorded = {(turn.episode, turn.replica) for turn in await all_turns(harness)}
    assert len(recorded) == 8
    assert {name for _, name in recorded} == {"rollout-0", "rollout-1"}


async def test_a_turn_is_generated_where_its_groups_last_turn_was(harness):
    replicas = [await harness.replica(f"rollout-{number}") for number in range(2)]
    job = await harness.job(rollout={"groupSize": 16})
    for replica in replicas:
        await harness.verified(replica.name, job.adapter(0))
    for index in range(4):
        for turn, last in enumerate(("rollout-1", "rollout-0", "rollout-0", "rollout-1")):
            await harness.ask(job.request(index=index, turn=turn, last_replica=last))
            assert (await harness.turn(job.request(index=index, turn=turn))).replica == last


async def test_the_report_tells_the_requests_in_the_engine_and_those_that_wait(harness, make_engine):
    engine = make_engine(limits={"max_num_seqs": 2})
    engine.open.clear()
    await harness.replica(engine=engine)
    job = await harness.job()
    async with contextlib.AsyncExitStack() as stack:
        asked = [await stack.enter_async_context(harness.asking(job.request(index=number))) for number in range(5)]
        await harness.pin(job.request(index=9), 1)
        waits_for_its_version = await stack.enter_async_context(harness.asking(job.request(index=9)))
        await harness.report("rollout-0", lambda report: (report.num_running, report.num_waiting) == (2, 4))
        engine.open.set()
        for one in asked:
            await one.end()
        await harness.commit(job, 1)
        await waits_for_its_version.end()
    await harness.report("rollout-0", lambda report: (report.num_running, report.num_waiting) == (0, 0))


async def all_turns(harness: Any) -> list[Any]:
    return [wire.decode(stored.data) for stored in await harness.bus.replay(subjects.TURNS, "turn.>")]


async def test_a_heartbeat_says_whether_a_turn_waits_or_is_generated(harness, make_engine, monkeypatch):
    monkeypatch.setattr(requests, "HEARTBEAT_S", 0.01)
    engine = make_engine(limits={"max_num_seqs": 1})
    engine.open.clear()
    await harness.replica(engine=engine)
    job, neighbour = await harness.job(), await harness.job("neighbour")
    async with harness.asking(neighbour.request()) as first:
        generated = await first.until_it_says("it was being generated")
        assert generated.running_s >= 0
        async with harness.asking(job.request()) as second:
            assert (await second.until_it_says("it waited for a place in the engine")).running_s is None
            assert (await first.until_it_says("it was being generated")).running_s > generated.running_s
            engine.open.set()
            assert (await first.end()).phase is (await second.end()).phase is ReplyPhase.RESULT


async def test_a_turn_in_the_engines_own_queue_waits(harness, shut_engine, monkeypatch):
    monkeypatch.setattr(requests, "HEARTBEAT_S", 0.01)
    shut_engine.queues = True
    _, job = await harness.serving(shut_engine)
    async with harness.asking(job.request()) as asked:
        assert (await asked.until_it_says("it waited within the engine")).running_s is None
        shut_engine.open.set()
        await asked.end()


async def test_a_cancelled_episode_is_aborted_within_the_engine(harness, shut_engine):
    _, job = await harness.serving(shut_engine)
    async with harness.asking(job.request()), harness.asking(job.request(index=1)) as other:
        while len(shut_engine.calls) < 2:
            await shut_engine.called.wait()
            shut_engine.called.clear()
        async with harness.asking(job.cancel()):
            await shut_engine.aborted.wait()
        shut_engine.open.set()
        assert (await other.end()).phase is ReplyPhase.RESULT
    assert await harness.turn(job.request()) is None


async def test_a_cancel_reaches_whichever_replica_is_at_it(harness, shut_engine):
    await harness.replica("rollout-0", shut_engine)
    await harness.replica("rollout-1")
    job = await harness.job()
    async with harness.asking(job.request(), of="rollout-0"):
        await shut_engine.called.wait()
        await harness.until(lambda: len(listeners(harness, job)) == 2)
        for _ in listeners(harness, job):
            async with harness.asking(job.cancel()):
                await shut_engine.aborted.wait()


def listeners(harness: Any, job: Any) -> list[Any]:
    subject = subjects.generation("team", job.document.job, "policy")
    return [listener for listener in harness.server.listeners if listener.subject == subject]


async def test_a_job_that_is_not_admitted_any_more_is_not_listened_to_and_its_requests_are_cancelled(
    harness, shut_engine
):
    """The replica does not receive the cancellation of the job's sandbox. The answer lets a sandbox that still runs send the request again."""
    _, job = await harness.serving(shut_engine)
    other = await harness.job("other")
    async with harness.asking(other.request(), of="rollout-0") as kept, harness.asking(job.request()) as asked:
        await harness.until(lambda: len(shut_engine.calls) == 2)
        await harness.admit(job, admitted=False)
        await shut_engine.aborted.wait()
        answer = await asked.end()
        assert (answer.phase, answer.retryable, answer.waits) == (ReplyPhase.FAILED, True, True)
        assert "not admitted any more" in answer.error
        await harness.until(lambda: not listeners(harness, job))
        shut_engine.open.set()
        assert (await kept.end()).phase is ReplyPhase.RESULT


async def test_the_report_tells_the_recent_tokens_of_each_agent_of_a_job_with_several(harness):
    _, job = await harness.serving(agents=[{"name": "policy"}, {"name": "critic"}])
    await harness.ask(job.request())
    report = await harness.report("rollout-0", lambda report: bool(report.agent_tokens))
    assert list(report.agent_tokens) == ["team.job.policy"]
    assert min(report.agent_tokens.values()) > 4, "the prompt counts too"


async def test_the_report_says_what_was_spent_on_whom(harness):
    await harness.replica()
    one, two = await harness.job("one"), await harness.job("two")
    for index in range(3):
        await harness.ask(one.request(index=index))
    await harness.ask(two.request())
    report = await harness.report("rollout-0", lambda report: report.job_tokens.get(two.uid, 0) > 0)
    assert report.job_tokens == {one.uid: 12, two.uid: 4}
    assert report.agent_tokens == {}, "each job has one agent"
    assert report.busy_s == pytest.approx(sum(report.job_engine_s.values()), abs=1e-6)
    assert 0 < report.busy_s < report.wall_s
    assert report.rss_bytes > 1 << 20
