"""Asking for turns: what is sent, and what becomes of silence, failures and impatience."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import ormsgpack
import pytest

from marlaas_api import wire
from marlaas_api.messages import (
    ChatMessage,
    Ending,
    FaultClass,
    StopReason,
)
from marlaas_worker.sandbox import attempt, service, session
from marlaas_worker.sandbox.turns import LEASE_S, TurnClient, TurnWaited


async def test_a_request_carries_the_whole_identity_and_what_is_appended(harness):
    await harness.play("asks")
    (request,) = harness.rollout.requests
    assert (request.namespace, request.job, request.uid, request.agent) == ("team-a", "job", "u1", "policy")
    assert (request.group, request.member, request.episode, request.turn) == ("u1-t0", 0, "u1-t0-0-1", 0)
    assert request.append == (ChatMessage(role="user", content="train 0 0"),)
    assert request.max_tokens is None
    assert request.deadline_s == LEASE_S


async def test_silence_is_answered_by_asking_again_with_the_same_name(harness):
    harness.rollout.answer = lambda request: (
        [harness.rollout.result(request, "1")] if len(harness.rollout.requests) > 2 else []
    )
    harness.timeouts = replace(harness.timeouts, silence_s=0.2)
    (episode,) = await harness.play("asks")
    assert episode.rewards == {"policy": 1.0}
    assert {(request.episode, request.turn) for request in harness.rollout.requests} == {("u1-t0-0-1", 0)}


async def test_a_failure_of_the_moment_is_tried_again(harness):
    def answer(request):
        first = len(harness.rollout.requests) <= 3
        return [harness.rollout.failure(request, "restarting", True) if first else harness.rollout.result(request, "1")]

    harness.rollout.answer = answer
    (episode,) = await harness.play("asks")
    assert (episode.rewards, episode.prior_faults, len(harness.rollout.requests)) == ({"policy": 1.0}, (), 4)


async def test_a_failure_for_good_is_a_fault_of_the_infrastructure_in_its_own_words(harness):
    harness.rollout.answer = lambda request: [harness.rollout.failure(request, "the adapter is corrupt", False)]
    (episode,) = await harness.play("asks", max_attempts=2)
    assert (episode.fault, episode.prior_faults) == (FaultClass.INFRA, (FaultClass.INFRA,))
    assert episode.fault_text == "rollout-0: the adapter is corrupt"


async def test_a_turn_that_stops_the_engine_is_a_fault_of_the_environment_and_is_not_played_again(harness):
    def answer(request):
        return [
            harness.rollout.failure(request, "the engine failed 3 times", False).model_copy(
                update={"stops_engine": True}
            )
        ]

    harness.rollout.answer = answer
    (episode,) = await harness.play("asks", max_attempts=2)
    assert (episode.fault, episode.prior_faults, episode.is_permanent) == (FaultClass.ENV, (), False)
    assert episode.fault_text == "rollout-0: the engine failed 3 times"


async def test_an_engine_that_takes_too_long_for_a_turn_is_a_fault_of_the_infrastructure(harness):
    """Nothing but the heartbeat wakes the wait for a reply: it brings the timeout nearer."""
    harness.timeouts = replace(harness.timeouts, silence_s=3600.0)
    harness.rollout.answer = lambda request: [
        harness.rollout.beat(request),
        harness.rollout.beat(request, running_s=69.99),
    ]
    (episode,) = await harness.play("asks", turn_timeout_seconds=70)
    assert episode.fault is FaultClass.INFRA
    assert "within 70 s, waits not counted (turnTimeoutSeconds); last: rollout-0: heartbeat" in episode.fault_text
    assert [cancel.episode for cancel in harness.rollout.cancelled] == ["u1-t0-0-1"]


async def test_waiting_for_an_engine_counts_neither_against_the_turn_nor_against_the_episode(harness, monkeypatch):
    """Every time that the turn is asked for, the supervisor's clock has gone on by more than the whole episode may take."""
    asked = harness.rollout.requests

    def answer(request):
        return [harness.rollout.result(request, "1") if len(asked) > 2 else harness.rollout.beat(request)]

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 600.0 * len(asked))
    for module in (attempt, session):
        monkeypatch.setattr(module, "time", clock)
    harness.rollout.answer = answer
    harness.timeouts = replace(harness.timeouts, silence_s=0.2)
    (episode,) = await harness.play("asks", turn_timeout_seconds=0.1)
    assert (episode.fault, episode.prior_faults, episode.rewards) == (None, (), {"policy": 1.0})
    assert episode.duration_s > 1800


@pytest.mark.parametrize("answers", ["nobody", "no place"])
async def test_a_turn_that_never_gets_its_place_is_played_again_and_is_no_fault(harness, monkeypatch, answers):
    monkeypatch.setattr(service, "_PAUSE_S", 0.01)
    harness.timeouts = replace(harness.timeouts, wait_s=0.1)

    def answer(request):
        if request.episode == "u1-t0-0-1":
            full = harness.rollout.failure(request, "no place", True).model_copy(update={"waits": True})
            return [full] if answers == "no place" else []
        return [harness.rollout.result(request, "1")]

    harness.rollout.answer = answer
    (episode,) = await harness.play("asks", max_attempts=1, turn_timeout_seconds=0.01)
    assert (episode.fault, episode.prior_faults) == (None, (FaultClass.WAITED,))
    assert episode.episode != "u1-t0-0-1"
    assert [cancel.episode for cancel in harness.rollout.cancelled] == ["u1-t0-0-1"]


async def test_plays_given_up_for_waiting_take_no_name_of_a_later_delivery(harness, monkeypatch):
    monkeypatch.setattr(service, "_PAUSE_S", 0.01)
    harness.timeouts = replace(harness.timeouts, wait_s=0.02)
    harness.rollout.answer = lambda request: (
        [harness.rollout.result(request, "1")]
        if len({request.episode for request in harness.rollout.requests}) > 3
        else []
    )
    (episode,) = await harness.play("asks", max_attempts=2)
    numbers = [int(request.episode.rsplit("-", 1)[1]) for request in harness.rollout.requests]
    of_deliveries = set(range(2, 2 * attempt.MAX_DELIVERIES + 2))
    plays = len(set(numbers))
    assert plays >= 4, "on a slow machine, an answered turn may be late too"
    assert not of_deliveries & set(numbers)
    assert episode.prior_faults == (FaultClass.WAITED,) * (plays - 1)


async def test_a_request_that_waits_is_kept_alive(harness):
    harness.timeouts = replace(harness.timeouts, silence_s=0.2, keep_s=0.01)
    harness.rollout.answer = lambda request: [
        harness.rollout.result(request, "1") if harness.rollout.kept else harness.rollout.beat(request)
    ]
    (episode,) = await harness.play("asks")
    assert episode.rewards == {"policy": 1.0}
    assert {(kept.uid, kept.agent, kept.episode) for kept in harness.rollout.kept} == {("u1", "policy", "u1-t0-0-1")}


async def test_failures_that_are_asked_again_for_longer_than_a_turn_may_take_are_a_fault(harness):
    harness.rollout.answer = lambda request: [harness.rollout.failure(request, "KeyError('x')", True)]
    (episode,) = await harness.play("asks", turn_timeout_seconds=0.1)
    assert episode.fault is FaultClass.INFRA
    assert "within 0.1 s" in episode.fault_text
    assert episode.fault_text.endswith("last: rollout-0: KeyError('x')")


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.CONTEXT])
async def test_an_agent_that_overruns_its_tokens_is_scored(harness, stop):
    harness.rollout.answer = lambda request: [harness.rollout.result(request, "0.5", stop)]
    (episode,) = await harness.play("asks")
    assert (episode.ending, episode.rewards) == (Ending.MAX_TOKENS, {"policy": 0.5})


async def test_garbage_late_answers_and_those_of_a_newer_release_on_the_inbox_are_ignored(harness):
    on_request = harness.rollout.on_request

    async def send_garbage_first(request):
        for data in (b"garbage", ormsgpack.packb({"v": wire.SCHEMA_VERSION + 1})):
            await harness.rollout.bus.send(request.reply, data)
        await on_request(request)

    def answer(request):
        good = harness.rollout.result(request, "1")
        return [harness.rollout.result(request.model_copy(update={"turn": 99}), "wrong"), good, good]

    harness.rollout.answer, harness.rollout.on_request = answer, send_garbage_first
    (episode,) = await harness.play("asks", args={"turns": 2})
    assert (episode.rewards, episode.num_turns) == ({"policy": 1.0}, 2)


async def test_a_bus_that_comes_back_in_time_costs_nothing_but_time(harness):
    await harness.bus.ensure()
    await harness.play("asks")
    request = harness.rollout.requests[0]
    client_bus = harness.server.connect("client")
    async with harness.rollout_role("policy"), TurnClient(client_bus, harness.timeouts) as client:
        harness.server.available = False
        asking = asyncio.create_task(client.generate(request, 20.0))
        await asyncio.wait({asking}, timeout=0.05)
        assert not asking.done()
        harness.server.available = True
        assert (await asking).text == "1"


async def test_nobody_there_is_told_at_the_end_of_the_wait(harness):
    await harness.bus.ensure()
    await harness.play("asks")
    async with TurnClient(harness.bus, replace(harness.timeouts, wait_s=0.1)) as client:
        with pytest.raises(TurnWaited, match="no reply"):
            await client.generate(harness.rollout.requests[0], 0.01)
