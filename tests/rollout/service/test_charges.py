"""What requests are charged: to the queue of this replica, to the quotas by reports, and to the queues of other replicas."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.harness import Harness

from marlaas_api import subjects
from marlaas_api.messages import ReplicaReport, ReplyPhase
from marlaas_api.names import PREEMPTION_STRIDE, episode_id

REPLY_TOKENS = 4


async def cancelled(harness: Any, job: Any, *began: Callable[[], Awaitable[object]]) -> ReplicaReport:
    """Ask, cancel once it has begun, and return the report when nothing runs any more."""
    async with harness.asking(job.request(), of="rollout-0"):
        for wait in began:
            await wait()
        async with harness.asking(job.cancel(), of="rollout-0"):
            found: ReplicaReport = await harness.report(
                "rollout-0", lambda report: report.num_running == 0 and report.tenant_tokens
            )
    return found


async def was_preempted(harness: Any, job: Any, role: Any) -> None:
    """Preempt the job, admit it again, and wait until the role knows."""
    for admitted in (False, True):
        await Harness.admit(harness, job.document, admitted=admitted, num_preemptions=1)
    await harness.until(lambda: role._policies.num_preemptions(job.document.ref) == 1)


async def test_a_cancelled_generation_is_charged_its_prompt_and_an_estimate_of_its_output(
    harness: Any, shut_engine: Any, roles: list[Any]
) -> None:
    _, job = await harness.serving(shut_engine, rollout={"maxTokens": 50})
    await was_preempted(harness, job, roles[0])
    found = await cancelled(harness, job, shut_engine.called.wait)
    num_prompt = len(shut_engine.calls[0].prompt_ids)
    assert 1 <= found.job_tokens[job.uid] <= 50, "for the quota of tokens a second"
    assert found.tenant_tokens == {"team": num_prompt + found.job_tokens[job.uid]}
    assert found.job_preempted_tokens == found.job_preempted_engine_s == {}, "its job was preempted only before"


async def test_a_generation_that_is_cancelled_after_a_preemption_counts_as_preempted(
    harness: Any, shut_engine: Any, roles: list[Any]
) -> None:
    _, job = await harness.serving(shut_engine, rollout={"maxTokens": 50})

    async def preempted() -> None:
        await was_preempted(harness, job, roles[0])  # and is admitted again before its sandbox cancels

    cut = await cancelled(harness, job, shut_engine.called.wait, preempted)
    assert cut.job_preempted_tokens == cut.job_tokens
    assert cut.job_preempted_engine_s == cut.job_engine_s
    assert list(cut.job_tokens) == [job.uid]


async def test_a_turn_tells_how_often_its_job_was_preempted_also_if_its_sandbox_learns_it_first(
    harness: Any, roles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, job = await harness.serving()
    request = job.request()
    later = request.model_copy(update={"episode": episode_id(request.group, 0, PREEMPTION_STRIDE + 1)})
    feigned = request.model_copy(update={"episode": episode_id(request.group, 0, 7 * PREEMPTION_STRIDE)})
    assert (await harness.ask(request)).phase is ReplyPhase.RESULT
    monkeypatch.setattr(roles[0]._policies._progress, "note", lambda entry: None)  # the watch is slow
    await Harness.admit(harness, job.document, num_preemptions=1)
    for one, number in ((request, 0), (later, 1), (feigned, 1)):
        assert (await harness.ask(one)).phase is ReplyPhase.RESULT
        assert (await harness.turn(one)).num_preemptions == number


async def test_a_generation_that_is_cancelled_before_its_first_token_is_charged_its_prompt(
    harness: Any, make_engine: Callable[..., Any]
) -> None:
    engine = make_engine(queues=True)
    engine.open.clear()
    _, job = await harness.serving(engine)
    found = await cancelled(harness, job, engine.called.wait)
    assert found.tenant_tokens == {"team": len(engine.calls[0].prompt_ids)}
    assert found.job_tokens[job.uid] == 0


async def test_a_generation_that_ends_with_its_engine_is_charged(harness: Any, make_engine: Callable[..., Any]) -> None:
    engine = make_engine(deaths=1)
    _, job = await harness.serving(engine)
    assert (await harness.ask(job.request())).phase is ReplyPhase.RESULT
    least = 2 * len(engine.calls[0].prompt_ids) + REPLY_TOKENS + 1
    await harness.report("rollout-0", lambda report: report.tenant_tokens.get("team", 0) >= least)


async def test_a_turn_that_the_engine_never_gets_costs_nothing(harness: Any, make_engine: Callable[..., Any]) -> None:
    engine = make_engine()
    _, job = await harness.serving(engine)
    await harness.ask(job.request(append="x" * 2000))
    await harness.ask(job.request(index=1))
    assert len(engine.calls) == 1
    found = await harness.report("rollout-0", lambda report: report.tenant_tokens)
    assert found.tenant_tokens == {"team": len(engine.calls[0].prompt_ids) + REPLY_TOKENS}


async def test_an_episode_is_open_while_its_request_waits_for_its_version(harness: Any, roles: list[Any]) -> None:
    await harness.replica()
    job = await harness.job(agents=[{"name": "policy"}, {"name": "critic"}])
    request = job.request()
    await harness.pin(request, 1)  # its trainer has not committed it yet
    async with harness.asking(request) as asked, harness.asking(job.request(agent="critic", turn=1, parent=None)):
        limiter = roles[0]._engine.limiter
        await harness.until(lambda: len(limiter.episodes) == 2)
        assert [len(account.below) for account in limiter._queue._root.below.values()] == [1]
        assert set(limiter._queue._root.below["team"].below[job.uid].below) == {"policy", "critic"}
        await harness.commit(job, 1)
        assert (await asked.end()).phase is ReplyPhase.RESULT


async def test_a_prompt_makes_room_for_the_next_one_at_its_first_token(
    harness: Any, make_engine: Callable[..., Any], roles: list[Any]
) -> None:
    engine = make_engine(limits={"step_tokens": 10})
    engine.open.clear()
    _, job = await harness.serving(engine)
    prefill = roles[0]._engine.limiter.prefill
    prefill.join("another tenant", 1.0)
    async with harness.asking(job.request()), harness.asking(job.request(index=1)):
        await harness.until(lambda: len(engine.calls) == 2)
        assert prefill._present["team"].num_prompt == 0


async def test_use_on_another_replica_is_charged_here(harness: Any, shut_engine: Any, roles: list[Any]) -> None:
    _, job = await harness.serving(shut_engine)
    key = subjects.replica_key("rollout", "pool", "other")
    other = ReplicaReport(role="rollout", pool="pool", replica="other", ready=False, tenant_tokens={"team": 5000})

    def usage() -> float:
        return float(roles[0]._engine.limiter.usage("team"))

    async with harness.asking(job.request(), of="rollout-0"):
        await shut_engine.called.wait()
        before = usage()
        for total in (5000, 5700, 5700, 20, 50):  # then it is restarted
            await harness.put(subjects.REPLICAS, key, other.model_copy(update={"tenant_tokens": {"team": total}}))
        await harness.until(lambda: usage() == before + 700 + 30)
        await (await harness.bus.bucket(subjects.REPLICAS)).delete(key)
        await harness.put(subjects.REPLICAS, key, other.model_copy(update={"tenant_tokens": {"team": 9000}}))
        await harness.put(subjects.REPLICAS, key, other.model_copy(update={"tenant_tokens": {"team": 9001}}))
        await harness.until(lambda: usage() == before + 731)
        shut_engine.open.set()
