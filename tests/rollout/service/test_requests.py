"""Requests: duplicates, owners, refusals, heartbeats, cancellations, deadlines and bounds, and what the report says of them."""

import asyncio
import contextlib

import pytest

from marlaas_api import subjects, wire
from marlaas_api.messages import KeepRequest, ReplyPhase
from marlaas_worker.rollout import requests


@contextlib.asynccontextmanager
async def asking_all(harness, requests):
    async with contextlib.AsyncExitStack() as stack:
        asked = [await stack.enter_async_context(harness.asking(one)) for one in requests]
        for one in asked:
            await one.until(ReplyPhase.ACCEPTED)
        yield asked


async def phases(asked):
    return {(await one.end()).phase for one in asked}


async def test_a_request_asked_again_is_generated_once_and_answered_at_the_end(harness, shut_engine, monkeypatch):
    monkeypatch.setattr(requests, "MAX_INBOXES", 2)
    _, job = await harness.serving(shut_engine)
    questions = [*[job.request()] * 3, job.request(append="something else~")]
    async with asking_all(harness, questions) as (first, *same, other):
        shut_engine.open.set()
        assert await same[0].end() == await same[1].end()
        assert await phases((same[0], other)) == {ReplyPhase.RESULT, ReplyPhase.FAILED}
    assert ReplyPhase.RESULT not in {heard.phase for heard in first.heard}
    assert len(shut_engine.calls) == 2


@pytest.mark.parametrize("changes", [{"append": "something else~"}, {"tools": ('{"name": "add"}',)}])
async def test_a_recorded_turn_is_answered_from_its_record_and_another_question_is_refused(harness, changes):
    earlier, job = await harness.serving()
    first = await harness.result(job.request())
    other = await harness.failure(job.request(**changes))
    assert not other.retryable
    assert "recorded with another parent or text" in other.error
    await earlier.kill()
    later = await harness.replica()
    assert "another parent or text" in (await harness.failure(job.request(**changes))).error
    again = await harness.result(job.request())
    assert (again.text, again.num_tokens) == (first.text, first.num_tokens) == ("yes", 4)
    assert later.engine.calls == []


@pytest.mark.parametrize(("num_characters", "held"), [(3, 1), (2 * requests._REQUEST_CHARACTERS, 2)])
async def test_a_job_with_too_many_requests_may_ask_again(harness, shut_engine, monkeypatch, num_characters, held):
    monkeypatch.setattr(requests, "MAX_CHARACTERS", num_characters)
    await harness.replica(engine=shut_engine)
    job, neighbour = await harness.job(), await harness.job("neighbour")
    under_way = [*(job.request(index=index) for index in range(held)), neighbour.request()]
    async with asking_all(harness, under_way) as asked:
        refused = await harness.failure(job.request(index=9))
        assert (refused.retryable, refused.waits) == (True, True)
        assert "too many requests or too much text" in refused.error
        shut_engine.open.set()
        assert await phases(asked) == {ReplyPhase.RESULT}
    await harness.result(job.request(index=9))


async def test_remembered_answers_are_bounded_in_bytes(harness, roles):
    """A duplicate of a request gets the remembered answer at once; one whose answer was forgotten is accepted anew."""
    _, job = await harness.serving()
    roles[0]._jobs.bounds.answers.max_bytes = 2000
    for index in range(12):
        await harness.result(job.request(index=index))
    for index, phases in ((11, [ReplyPhase.RESULT]), (0, [ReplyPhase.ACCEPTED, ReplyPhase.RESULT])):
        async with harness.asking(job.request(index=index)) as asked:
            await asked.end()
        assert asked.without_heartbeats == phases


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


async def test_requests_go_to_the_owner_of_their_episode_and_to_where_their_groups_last_turn_was(harness):
    replicas = [await harness.replica(f"rollout-{number}") for number in range(2)]
    job = await harness.job(rollout={"groupSize": 16})
    for replica in replicas:
        await harness.verified(replica.name, job.adapter(0))
    for index in range(8):
        await harness.ask(job.request(index=index))
        await harness.ask(job.request(index=index, turn=1))
    stored = await harness.bus.replay(subjects.TURNS, "turn.>")
    recorded = {(turn.episode, turn.replica) for turn in (wire.decode(one.data) for one in stored)}
    assert len(recorded) == 8
    assert {name for _, name in recorded} == {"rollout-0", "rollout-1"}
    for turn, last in enumerate(("rollout-1", "rollout-0", "rollout-0", "rollout-1")):
        await harness.ask(job.request(index=8, turn=turn, last_replica=last))
        assert (await harness.turn(job.request(index=8, turn=turn))).replica == last


async def test_heartbeats_say_whether_a_turn_waits_or_is_generated_and_the_report_how_many(harness, make_engine):
    engine = make_engine(limits={"max_num_seqs": 1}, queues=True)
    engine.open.clear()
    await harness.replica(engine=engine)
    job, neighbour = await harness.job(), await harness.job("neighbour")
    await harness.pin(job.request(index=4), 1)  # It waits for its version.
    async with harness.asking(neighbour.request()) as first, harness.asking(job.request(index=4)) as third:
        assert (await first.until_it_says("it waited within the engine")).running_s is None
        async with harness.asking(job.request()) as second:
            assert (await second.until_it_says("it waited for a place in the engine")).running_s is None
            await harness.report("rollout-0", lambda report: (report.num_running, report.num_waiting) == (1, 2))
            engine.begin_all()
            generated = await first.until_it_says("it was being generated")
            assert (await first.until_it_says("it was being generated")).running_s == generated.running_s + 1.0
            engine.open.set()
            await harness.commit(job, 1)
            assert await phases((first, second, third)) == {ReplyPhase.RESULT}
    await harness.report("rollout-0", lambda report: (report.num_running, report.num_waiting) == (0, 0))


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_a_cancelled_episode_is_aborted_in_the_engine_of_its_replica(harness, shut_engine, num_replicas):
    for number in range(num_replicas):
        await harness.replica(f"rollout-{number}", None if number else shut_engine)
    job = await harness.job()
    others = job.request(index=1)
    async with harness.asking(job.request(), of="rollout-0"), harness.asking(others, of="rollout-0") as other:
        await harness.until(lambda: len(shut_engine.calls) == 2 and len(listeners(harness, job)) == num_replicas)
        for _ in range(num_replicas):
            async with harness.asking(job.cancel()):
                await shut_engine.aborted.wait()
        shut_engine.open.set()
        assert (await other.end()).phase is ReplyPhase.RESULT
    assert await harness.turn(job.request()) is None


def listeners(harness, job):
    subject = subjects.generation("team", job.document.job, "policy")
    return [listener for listener in harness.server.listeners if listener.subject == subject]


async def test_a_job_that_is_not_admitted_any_more_is_not_heard_and_its_requests_are_cancelled(harness, shut_engine):
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


async def test_the_report_says_what_was_spent_on_whom(harness, shut_engine):
    await harness.replica(engine=shut_engine)
    one, two = await harness.job("one"), await harness.job("two", agents=[{"name": "policy"}, {"name": "critic"}])
    async with harness.asking(one.request()) as first, harness.asking(two.request()) as second:
        await harness.until(lambda: len(shut_engine.calls) == 2)
        await asyncio.sleep(3.0)
        shut_engine.open.set()
        await asyncio.gather(first.end(), second.end())
    await harness.result(one.request(index=1))
    report = await harness.report("rollout-0", lambda report: report.job_tokens.get(one.uid, 0) > 4)
    assert report.job_tokens == {one.uid: 8, two.uid: 4}
    assert list(report.agent_tokens) == ["team.two.policy"], "the other job has one agent"
    assert min(report.agent_tokens.values()) > 4, "the prompt counts too"
    assert report.busy_s == pytest.approx(3.0, abs=0.1)
    assert report.job_engine_s == pytest.approx({one.uid: report.busy_s / 2, two.uid: report.busy_s / 2}, abs=0.1)
    assert report.busy_s < report.wall_s
    assert report.rss_bytes > 1 << 20


async def test_a_request_that_claims_to_be_another_jobs_or_wants_its_answer_elsewhere_is_ignored(harness):
    replica, mine, other = await harness.replica(), await harness.job("mine"), await harness.job("other")
    policy, subject = await harness.bus.bucket(subjects.POLICY), subjects.generation("team", "mine", "policy")
    before = await policy.entries()
    await harness.bus.send(subject, wire.encode(other.request()), harness.bus.new_inbox())
    for reply in (f"$KV.policy.{other.document.ref.key}.policy", "_INBOX_team_other.x", "task.team.other", ""):
        await harness.bus.send(subject, wire.encode(mine.request()), reply)
        passed_on = mine.request().model_copy(update={"reply_to": reply or None})
        await harness.bus.send(subjects.engine("pool", "rollout-0"), wire.encode(passed_on))
    assert (await harness.ask(mine.request())).phase is ReplyPhase.RESULT
    assert [call.adapter.name for call in replica.engine.calls] == [mine.adapter(0).engine_name]
    assert await policy.entries() == before
    assert await harness.bus.replay(subjects.TASKS, "task.>") == []


async def test_a_request_that_cannot_be_handled_ends_no_replica(harness, monkeypatch):
    accept = requests.Requests.accept

    async def fail_at_turn_9(self, request, inbox):
        if request.turn == 9:
            raise TypeError("this request cannot be handled")
        await accept(self, request, inbox)

    monkeypatch.setattr(requests.Requests, "accept", fail_at_turn_9)
    replica, job = await harness.serving()
    for of in ("rollout-0", None):
        async with harness.asking(job.request(turn=9), of), harness.asking(job.request(), of) as asked:
            ended = asyncio.create_task(asked.end())
            await asyncio.wait((ended, replica.task), return_when=asyncio.FIRST_COMPLETED)
            assert ended.done()
            assert not replica.task.done()


async def test_a_request_fails_at_its_deadline_unless_it_is_asked_again_or_kept(harness, shut_engine):
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
        async with harness.asking(job.cancel(KeepRequest)), harness.asking(asked_again):
            ended = await forgotten.end()
        assert (ended.phase, ended.retryable, ended.waits, at()) == (ReplyPhase.FAILED, True, True, due)
        assert "passed while it was being generated" in ended.error
        await shut_engine.aborted.wait()
        await asyncio.sleep(30.0)
        shut_engine.open.set()
        assert (await kept.end()).phase is (await again.end()).phase is ReplyPhase.RESULT


async def test_an_agent_without_a_version_is_named_at_the_deadline(harness):
    _, job = await harness.serving(agents=[{"name": "policy"}, {"name": "critic"}])
    reply = await harness.ask(job.request(agent="critic", turn=1, deadline_s=0.1))
    assert (reply.retryable, "no version of agent critic was verified yet" in reply.error) == (True, True)


@pytest.mark.parametrize("ends_in_time", [True, False])
async def test_a_stopping_replica_takes_nothing_new_and_hands_back_the_rest(harness, shut_engine, ends_in_time):
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
