"""Asking for turns: what is sent, and what becomes of silence, failures and impatience."""

import asyncio
from dataclasses import replace

import pytest

from marlaas_api.messages import ChatMessage, Ending, FaultClass, StopReason
from marlaas_worker.sandbox.turns import TurnClient, TurnFailed


async def test_turns_name_their_parents_and_leaves_are_where_branches_end(stage) -> None:
    document = stage.document("rogues:TwoAgents", agents=("proposer", "solver"))
    async with stage.open(document):
        await stage.put(stage.task(document))
        (episode,) = await stage.episodes(1)
    asked = [(request.agent, request.turn, request.parent) for request in stage.rollout.requests]
    assert asked == [
        ("proposer", 0, None),
        ("solver", 1, None),
        ("solver", 2, 1),
        ("solver", 3, 1),
        ("proposer", 4, None),
    ]
    assert episode.leaves == {"proposer": (0, 4), "solver": (2, 3)}
    assert episode.rewards == {"proposer": 0.25, "solver": 1.0}


async def test_a_request_carries_the_whole_identity_and_what_is_appended(stage) -> None:
    await stage.play("asks", turn_timeout_seconds=70)
    (request,) = stage.rollout.requests
    assert (request.namespace, request.job, request.uid, request.agent) == ("team-a", "job", "u1", "policy")
    assert (request.group, request.member, request.episode, request.turn) == ("u1-t0", 0, "u1-t0-0-1", 0)
    assert request.append == (ChatMessage(role="user", content="train 0 0"),)
    assert request.max_tokens is None
    assert 40 < request.deadline_s <= 70


async def test_silence_is_answered_by_asking_again_with_the_same_name(stage) -> None:
    stage.rollout.answer = lambda request: (
        [stage.rollout.result(request, "1")] if len(stage.rollout.requests) > 2 else []
    )
    stage.patience = replace(stage.patience, heard_s=0.2)
    (episode,) = await stage.play("asks")
    assert episode.rewards == {"policy": 1.0}
    assert {(request.episode, request.turn) for request in stage.rollout.requests} == {("u1-t0-0-1", 0)}
    deadlines = [request.deadline_s for request in stage.rollout.requests]
    assert deadlines == sorted(deadlines, reverse=True)


async def test_a_failure_of_the_moment_is_tried_again(stage) -> None:
    def answer(request):
        first = len(stage.rollout.requests) <= 3
        return [stage.rollout.failure(request, "restarting", True) if first else stage.rollout.result(request, "1")]

    stage.rollout.answer = answer
    (episode,) = await stage.play("asks")
    assert (episode.rewards, episode.prior_faults, len(stage.rollout.requests)) == ({"policy": 1.0}, (), 4)


async def test_a_failure_for_good_is_a_fault_of_the_infrastructure_in_its_own_words(stage) -> None:
    stage.rollout.answer = lambda request: [stage.rollout.failure(request, "the adapter is corrupt", False)]
    (episode,) = await stage.play("asks", max_attempts=2)
    assert (episode.fault, episode.prior_faults) == (FaultClass.INFRA, (FaultClass.INFRA,))
    assert episode.fault_text == "rollout-0: the adapter is corrupt"


async def test_waiting_for_a_turn_ends_and_is_not_the_environments_time(stage) -> None:
    stage.rollout.answer = lambda request: [stage.rollout.beat(request)]
    (episode,) = await stage.play("asks", turn_timeout_seconds=1, episode_timeout_seconds=0.5)
    assert episode.fault is FaultClass.INFRA
    assert "within 1 s (turnTimeoutSeconds); last: rollout-0: heartbeat" in episode.fault_text
    assert [cancel.episode for cancel in stage.rollout.cancelled] == ["u1-t0-0-1"]


async def test_a_child_that_dies_while_it_waits_cancels_its_turn(stage) -> None:
    stage.rollout.answer = lambda request: [stage.rollout.beat(request)]
    (episode,) = await stage.play("dies_while_it_waits")
    assert (episode.fault, "exit status 9" in episode.fault_text) == (FaultClass.ENV, True)
    assert len(stage.rollout.cancelled) == 1


async def test_an_agent_that_overruns_its_turns_is_scored(stage) -> None:
    (episode,) = await stage.play("takes_all_turns")
    assert (episode.fault, episode.ending, episode.num_turns) == (None, Ending.MAX_TURNS, 4)
    assert episode.rewards == {"policy": 0.5}


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.CONTEXT])
async def test_an_agent_that_overruns_its_tokens_is_scored(stage, stop: StopReason) -> None:
    stage.rollout.answer = lambda request: [stage.rollout.result(request, "0.5", stop)]
    (episode,) = await stage.play("asks")
    assert (episode.ending, episode.rewards) == (Ending.MAX_TOKENS, {"policy": 0.5})


async def test_garbage_and_late_answers_on_the_inbox_are_ignored(stage) -> None:
    def answer(request):
        good = stage.rollout.result(request, "1")
        return [stage.rollout.result(request.model_copy(update={"turn": 99}), "wrong"), good, good]

    stage.rollout.answer = answer
    (episode,) = await stage.play("asks", args={"turns": 2})
    assert (episode.rewards, episode.num_turns) == ({"policy": 1.0}, 2)


async def test_a_bus_that_comes_back_in_time_costs_nothing_but_time(stage) -> None:
    await stage.bus.ensure()
    await stage.play("asks")
    request = stage.rollout.requests[0].model_copy(update={"deadline_s": 20.0})
    client_bus = stage.server.connect("client")
    async with stage.rollout_role("policy"), TurnClient(client_bus, stage.patience) as client:
        stage.server.available = False
        asking = asyncio.create_task(client.generate(request))
        await asyncio.wait({asking}, timeout=0.05)
        assert not asking.done()
        stage.server.available = True
        assert (await asking).text == "1"


async def test_nobody_there_is_a_failure_that_says_so(stage) -> None:
    await stage.bus.ensure()
    await stage.play("asks")
    request = stage.rollout.requests[0].model_copy(update={"deadline_s": 0.1})
    async with TurnClient(stage.bus, stage.patience) as client:
        with pytest.raises(TurnFailed, match="nobody answered"):
            await client.generate(request)
