import asyncio
from typing import Any

from marlaas_api import subjects, wire
from marlaas_api.messages import ReplyPhase
from marlaas_worker.rollout import requests


async def test_a_request_that_claims_to_be_another_jobs_is_ignored(harness):
    replica, mine, other = await harness.replica(), await harness.job("mine"), await harness.job("other")
    inbox = harness.bus.new_inbox()
    await harness.bus.send(subjects.generation("team", "mine", "policy"), wire.encode(other.request()), inbox)
    assert (await harness.ask(mine.request())).phase is ReplyPhase.RESULT
    assert [call.adapter.name for call in replica.engine.calls] == [mine.adapter(0).engine_name]


async def test_a_request_that_wants_its_answer_elsewhere_is_ignored(harness):
    replica, mine, other = await harness.replica(), await harness.job("mine"), await harness.job("other")
    policy = await harness.bus.bucket(subjects.POLICY)
    before = await policy.entries()
    elsewhere = (f"$KV.policy.{other.document.ref.key}.policy", "_INBOX_team_other.x", "task.team.other", "")
    for reply in elsewhere:
        await harness.bus.send(subjects.generation("team", "mine", "policy"), wire.encode(mine.request()), reply)
        passed_on = mine.request().model_copy(update={"reply_to": reply or None})
        await harness.bus.send(subjects.engine("pool", "rollout-0"), wire.encode(passed_on))
    assert (await harness.ask(mine.request(turn=0))).phase is ReplyPhase.RESULT
    assert len(replica.engine.calls) == 1
    assert await policy.entries() == before
    assert await harness.bus.replay(subjects.TASKS, "task.>") == []


async def test_a_request_that_cannot_be_handled_ends_no_replica(harness, monkeypatch):
    """It is received by each replica directly, and by the agent's subject."""
    accept = requests.Requests.accept

    async def fail_at_turn_9(self: Any, request: Any, inbox: str) -> None:
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
