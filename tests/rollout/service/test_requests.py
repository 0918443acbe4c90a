import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from marlaas_api import subjects, wire
from marlaas_api.messages import CancelRequest, KeepRequest, ReplyPhase
from marlaas_worker.rollout import requests, service


def cancel(job: Any, kind: type[CancelRequest] | type[KeepRequest] = CancelRequest) -> CancelRequest | KeepRequest:
    return kind(**job.request().model_dump(include={"namespace", "job", "uid", "agent", "episode"}))


async def test_a_request_asked_twice_is_generated_once_and_answered_twice(town: Any, shut_engine: Any) -> None:
    await town.replica(engine=shut_engine)
    job = await town.job()
    async with town.asking(job.request()) as one, town.asking(job.request()) as other:
        await other.until(ReplyPhase.ACCEPTED)
        shut_engine.open.set()
        assert (await one.end()).text == (await other.end()).text == "yes"
    assert len(shut_engine.calls) == 1


async def test_an_answered_request_is_answered_again_without_generating(town: Any) -> None:
    replica, job = await town.replica(), await town.job()
    assert await town.ask(job.request()) == await town.ask(job.request())
    assert len(replica.engine.calls) == 1


async def test_a_turn_recorded_by_an_earlier_process_is_answered_from_its_record(town: Any) -> None:
    earlier = await town.replica()
    job = await town.job()
    await town.ask(job.request())
    await earlier.kill()
    later = await town.replica()
    reply = await town.ask(job.request(), of="rollout-0")
    assert (reply.text, reply.num_tokens) == ("yes", 4)
    assert later.engine.calls == []


@pytest.mark.parametrize("changes", [{"append": "something else~"}, {"tools": ('{"name": "add"}',)}])
async def test_another_question_under_the_name_of_a_recorded_turn_is_refused(
    town: Any, changes: dict[str, Any]
) -> None:
    earlier, job = await town.replica(), await town.job()
    first = await town.ask(job.request())
    other = await town.ask(job.request(**changes), of="rollout-0")
    assert (other.phase, other.retryable) == (ReplyPhase.FAILED, False)
    assert "recorded as the answer to something else" in other.error
    await earlier.kill()
    later = await town.replica()
    assert "something else" in (await town.ask(job.request(**changes), of="rollout-0")).error
    assert (await town.ask(job.request())).text == first.text
    assert later.engine.calls == []


async def test_two_questions_of_one_name_at_once_get_no_common_answer(town: Any, shut_engine: Any) -> None:
    await town.replica(engine=shut_engine)
    job = await town.job()
    async with town.asking(job.request()) as one, town.asking(job.request(append="something else~")) as other:
        await other.until(ReplyPhase.ACCEPTED)
        shut_engine.open.set()
        phases = {(await one.end()).phase, (await other.end()).phase}
    assert phases == {ReplyPhase.RESULT, ReplyPhase.FAILED}


async def test_a_job_with_too_much_text_under_way_may_ask_again_and_others_notice_nothing(
    town: Any, shut_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MOST_CHARACTERS", 3)
    await town.replica(engine=shut_engine)
    job, neighbour = await town.job(), await town.job("neighbour")
    async with town.asking(job.request()) as first, town.asking(neighbour.request()) as others:
        await first.until(ReplyPhase.ACCEPTED)
        refused = await town.ask(job.request(index=1))
        assert (refused.phase, refused.retryable, refused.waits) == (ReplyPhase.FAILED, True, True)
        assert "too much text" in refused.error
        shut_engine.open.set()
        assert (await first.end()).phase is (await others.end()).phase is ReplyPhase.RESULT
    assert (await town.ask(job.request(index=1))).phase is ReplyPhase.RESULT


async def test_a_turn_that_is_asked_for_from_everywhere_is_answered_where_it_was_asked_for_last(
    town: Any, shut_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MOST_INBOXES", 2)
    await town.replica(engine=shut_engine)
    job = await town.job()
    async with (
        town.asking(job.request()) as first,
        town.asking(job.request()) as second,
        town.asking(job.request()) as third,
    ):
        for asked in (first, second, third):
            await asked.until(ReplyPhase.ACCEPTED)
        shut_engine.open.set()
        assert (await second.end()).phase is (await third.end()).phase is ReplyPhase.RESULT
        assert ReplyPhase.RESULT not in {heard.phase for heard in first.heard}


async def test_of_two_replicas_that_play_one_turn_the_first_record_counts_for_both(
    town: Any, make_engine: Callable[..., Any]
) -> None:
    engines = [make_engine(reply="yes~"), make_engine(reply="no~")]
    for number, engine in enumerate(engines):
        engine.open.clear()
        await town.replica(f"rollout-{number}", engine)
    job = await town.job()
    async with (
        town.asking(job.request(), of="rollout-0") as one,
        town.asking(job.request(), of="rollout-1") as other,
    ):
        await asyncio.gather(*(engine.called.wait() for engine in engines))
        engines[1].open.set()
        assert (await other.end()).text == "no"
        engines[0].open.set()
        assert (await one.end()).text == "no"
    assert len(await town.bus.replay(subjects.TURNS, "turn.>")) == 1
    assert (await town.turn(job.request())).replica == "rollout-1"


async def test_requests_go_to_the_owner_of_their_episode(town: Any) -> None:
    replicas = [await town.replica(f"rollout-{number}") for number in range(2)]
    job = await town.job()
    for replica in replicas:
        await town.verified(replica.name, job.adapter(0))
    for index in range(8):
        await town.ask(job.request(index=index))
        await town.ask(job.request(index=index, turn=1))
    recorded = {(turn.episode, turn.replica) for turn in await all_turns(town)}
    assert len(recorded) == 8
    assert {name for _, name in recorded} == {"rollout-0", "rollout-1"}


async def all_turns(town: Any) -> list[Any]:
    return [wire.decode(stored.data) for stored in await town.bus.replay(subjects.TURNS, "turn.>")]


async def test_a_request_that_claims_to_be_another_jobs_is_ignored(town: Any) -> None:
    replica, mine, other = await town.replica(), await town.job("mine"), await town.job("other")
    inbox = town.bus.new_inbox()
    await town.bus.send(subjects.generation("team", "mine", "policy"), wire.encode(other.request()), inbox)
    assert (await town.ask(mine.request())).phase is ReplyPhase.RESULT
    assert [call.adapter.name for call in replica.engine.calls] == [mine.adapter(0).engine_name]


async def test_a_request_that_wants_its_answer_elsewhere_is_ignored(town: Any) -> None:
    replica, mine, other = await town.replica(), await town.job("mine"), await town.job("other")
    policy = await town.bus.bucket(subjects.POLICY)
    before = await policy.entries()
    elsewhere = (f"$KV.policy.{other.document.ref.key}.policy", "_INBOX_team_other.x", "task.team.other", "")
    for reply in elsewhere:
        await town.bus.send(subjects.generation("team", "mine", "policy"), wire.encode(mine.request()), reply)
        passed_on = mine.request().model_copy(update={"reply_to": reply or None})
        await town.bus.send(subjects.engine("pool", "rollout-0"), wire.encode(passed_on))
    assert (await town.ask(mine.request(turn=0))).phase is ReplyPhase.RESULT
    assert len(replica.engine.calls) == 1
    assert await policy.entries() == before
    assert await town.bus.replay(subjects.TASKS, "task.>") == []


async def test_a_heartbeat_says_whether_a_turn_waits_or_is_generated(
    town: Any, make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "HEARTBEAT_S", 0.01)
    engine = make_engine(limits={"max_num_seqs": 1})
    engine.open.clear()
    await town.replica(engine=engine)
    job, neighbour = await town.job(), await town.job("neighbour")
    async with town.asking(neighbour.request()) as first:
        generated = await first.until_it_says("it was being generated")
        assert generated.running_s >= 0
        async with town.asking(job.request()) as second:
            assert (await second.until_it_says("it waited for a place in the engine")).running_s is None
            assert (await first.until_it_says("it was being generated")).running_s > generated.running_s
            engine.open.set()
            assert (await first.end()).phase is (await second.end()).phase is ReplyPhase.RESULT


async def test_a_turn_in_the_engines_own_queue_waits(
    town: Any, shut_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "HEARTBEAT_S", 0.01)
    shut_engine.queues = True
    await town.replica(engine=shut_engine)
    job = await town.job()
    async with town.asking(job.request()) as asked:
        assert (await asked.until_it_says("it waited within the engine")).running_s is None
        shut_engine.open.set()
        await asked.end()


async def test_a_cancelled_episode_is_aborted_within_the_engine(town: Any, shut_engine: Any) -> None:
    await town.replica(engine=shut_engine)
    job = await town.job()
    async with town.asking(job.request()), town.asking(job.request(index=1)) as other:
        while len(shut_engine.calls) < 2:
            await shut_engine.called.wait()
            shut_engine.called.clear()
        async with town.asking(cancel(job)):
            await shut_engine.aborted.wait()
        shut_engine.open.set()
        assert (await other.end()).phase is ReplyPhase.RESULT
    assert await town.turn(job.request()) is None


async def test_a_cancel_reaches_whichever_replica_is_at_it(town: Any, shut_engine: Any) -> None:
    await town.replica("rollout-0", shut_engine)
    await town.replica("rollout-1")
    job = await town.job()
    async with town.asking(job.request(), of="rollout-0"):
        await shut_engine.called.wait()
        await town.until(lambda: len(listeners(town, job)) == 2)
        for _ in listeners(town, job):
            async with town.asking(cancel(job)):
                await shut_engine.aborted.wait()


def listeners(town: Any, job: Any) -> list[Any]:
    subject = subjects.generation("team", job.document.job, "policy")
    return [listener for listener in town.server.listeners if listener.subject == subject]


async def test_a_request_fails_at_its_deadline_and_says_what_it_was_at(town: Any, shut_engine: Any) -> None:
    await town.replica(engine=shut_engine)
    job = await town.job()
    await town.verified("rollout-0", job.adapter(0))
    reply = await town.ask(job.request(deadline_s=2.0))
    assert (reply.phase, reply.retryable) == (ReplyPhase.FAILED, True)
    assert "was over while it was being generated" in reply.error
    await shut_engine.aborted.wait()


async def test_asking_again_prolongs_the_deadline(town: Any, shut_engine: Any) -> None:
    await town.replica(engine=shut_engine)
    job = await town.job()
    impatient = job.request(index=1, deadline_s=1.0)
    async with (
        town.asking(job.request(deadline_s=1.0)) as asked,
        town.asking(job.request()),
        town.asking(impatient) as one,
    ):
        assert (await one.end()).phase is ReplyPhase.FAILED
        shut_engine.open.set()
        assert (await asked.end()).phase is ReplyPhase.RESULT


async def test_a_request_lives_on_while_its_sandbox_says_that_it_waits(
    town: Any, shut_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await town.replica(engine=shut_engine)
    job = await town.job()
    await town.verified("rollout-0", job.adapter(0))
    monkeypatch.setattr(requests, "LONGEST_DEADLINE_S", 1.0)
    async with town.asking(job.request()) as kept, town.asking(job.request(index=1)) as forgotten:
        await forgotten.until(ReplyPhase.ACCEPTED)
        monkeypatch.setattr(requests, "LONGEST_DEADLINE_S", 3600.0)
        async with town.asking(cancel(job, KeepRequest)):
            ended = await forgotten.end()
        assert (ended.phase, ended.retryable, ended.waits) == (ReplyPhase.FAILED, True, True)
        shut_engine.open.set()
        assert (await kept.end()).phase is ReplyPhase.RESULT


async def test_a_request_that_is_just_being_dropped_may_be_asked_for_again(
    town: Any, shut_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped, let_go = asyncio.Event(), shut_engine._let_go

    async def slowly() -> None:
        try:
            await let_go()
        except asyncio.CancelledError:
            await dropped.wait()
            raise

    monkeypatch.setattr(shut_engine, "_let_go", slowly)
    await town.replica(engine=shut_engine)
    job = await town.job()
    await town.verified("rollout-0", job.adapter(0))
    async with town.asking(job.request(deadline_s=0.5)) as first:
        await shut_engine.aborted.wait()
        async with town.asking(cancel(job, KeepRequest)), town.asking(job.request()) as again:
            await again.until(ReplyPhase.ACCEPTED)
            dropped.set()
            assert ((await first.end()).waits, (await again.end()).waits) == (True, True)
    shut_engine.open.set()
    assert (await town.ask(job.request())).phase is ReplyPhase.RESULT


async def test_an_agent_without_a_version_is_named_at_the_deadline(town: Any) -> None:
    await town.replica()
    job = await town.job(agents=[{"name": "policy"}, {"name": "critic"}])
    reply = await town.ask(job.request(agent="critic", deadline_s=0.1))
    assert (reply.retryable, "no version of agent critic was verified yet" in reply.error) == (True, True)


async def test_a_record_that_the_bus_does_not_take_waits_and_is_not_generated_again(
    town: Any, shut_engine: Any
) -> None:
    await town.replica(engine=shut_engine)
    job = await town.job()
    async with town.asking(job.request()) as asked:
        await shut_engine.called.wait()
        town.server.available = False
        shut_engine.open.set()
        failing = asyncio.get_running_loop().create_task(asked.end())
        while not town.server.available:
            await town.server.change(0.3, None)
            town.server.available = True
        assert (await failing).phase is ReplyPhase.RESULT
    assert len(shut_engine.calls) == 1


async def test_a_stopping_replica_ends_what_it_began_and_takes_nothing_new(town: Any, shut_engine: Any) -> None:
    replica, job = await town.replica(engine=shut_engine), await town.job()
    async with town.asking(job.request()) as asked:
        await shut_engine.called.wait()
        replica.context.stop.set()
        await town.report("rollout-0", lambda report: not report.ready)
        refused = await town.ask(job.request(index=1), of="rollout-0")
        assert (refused.phase, refused.retryable, refused.waits) == (ReplyPhase.FAILED, True, True)
        shut_engine.open.set()
        assert (await asked.end()).phase is ReplyPhase.RESULT
        await replica.task
    assert await (await town.bus.bucket(subjects.REPLICAS)).entries() == []
    assert not await shut_engine.healthy()


async def test_what_does_not_end_in_time_is_handed_back(
    town: Any, shut_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DRAIN_S", 0.05)
    replica, job = await town.replica(engine=shut_engine), await town.job()
    async with town.asking(job.request()) as asked:
        await shut_engine.called.wait()
        await replica.stop()
        reply = await asked.end()
    assert (reply.retryable, reply.waits) == (True, True)
    assert "is stopping while it was being generated" in reply.error


async def test_a_finished_job_is_no_longer_listened_to(town: Any) -> None:
    await town.replica()
    job = await town.job()
    await town.ask(job.request())
    await town.admit(job, admitted=False)
    subject = subjects.generation("team", "job", "policy")
    await town.until(lambda: all(listener.subject != subject for listener in town.server.listeners))


async def test_the_report_says_what_was_spent_on_whom(town: Any) -> None:
    await town.replica()
    one, two = await town.job("one"), await town.job("two")
    for index in range(3):
        await town.ask(one.request(index=index))
    await town.ask(two.request())
    report = await town.report("rollout-0", lambda report: report.job_tokens.get(two.uid, 0) > 0)
    assert report.job_tokens == {one.uid: 12, two.uid: 4}
    assert report.busy_s == pytest.approx(sum(report.job_engine_s.values()), abs=1e-6)
    assert 0 < report.busy_s < report.wall_s
    assert report.rss_bytes > 1 << 20
