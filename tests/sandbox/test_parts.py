"""Turns of several agents and of parts that run at the same time, the answers that their threads wait for, and what the exit of a child means."""

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.harness import changed
from tests.tables import rows

from marlaas.environment_types import TurnRequest
from marlaas_api.messages import (
    ChatMessage,
    Ending,
    FaultClass,
    GenerateRequest,
    ReplyPartsMessage,
    ToolCallMessage,
)
from marlaas_api.messages.training_settings import DistillationSettings
from marlaas_api.names import BRANCH_TURNS, SCORES
from marlaas_worker.sandbox.channel import SupervisorChannel, encode_frame, receive_frame
from marlaas_worker.sandbox.faults import fault_of_exit
from marlaas_worker.sandbox.server import Ended


async def test_turns_name_their_parents_and_the_last_replica_and_leaves_are_where_branches_end(harness):
    document = harness.document("rogues:TwoAgents", agents=("proposer", "solver"))

    def answer(request):
        return [harness.rollout.result(request, "1").model_copy(update={"replica": f"of-turn-{request.turn}"})]

    harness.rollout.answer = answer
    (episode,) = await harness.play_document(document)
    asked = [(one.agent, one.turn, one.parent, one.last_replica) for one in harness.rollout.requests]
    proposer = [("proposer", 0, None, ""), ("proposer", 2, None, "of-turn-0")]
    solver = [("solver", 1, None, ""), ("solver", 3, 1, "of-turn-1"), ("solver", 5, 1, "of-turn-3")]
    assert asked == [proposer[0], *solver, proposer[1]]
    assert episode.leaves == {"proposer": (0, 2), "solver": (3, 5)}
    assert episode.rewards == {"proposer": 0.25, "solver": 1.0}


def taught(harness, name="rogues:TwoAgents", students=("proposer", "solver")):
    """Students and a teacher, which the environment does not know of."""
    document = harness.document(name, agents=(*students, "teacher"))
    *own, teacher = document.spec.agents
    teaching = {"algorithm": "distill", "distillation": DistillationSettings(teacher="teacher")}
    training = document.spec.training.model_copy(update=teaching)
    agents = (*own, teacher.model_copy(update={"trainable": False}))
    return changed(document, training=training, agents=agents)


async def test_a_teacher_scores_the_conversations_of_a_training_episode_before_it_is_published(harness):
    (episode,) = await harness.play_document(taught(harness))
    asked = [(one.agent, one.turn - SCORES, one.scores, one.parent) for one in harness.rollout.requests[5:]]
    assert sorted(asked) == [("teacher", leaf, leaf, None) for leaf in (0, 3, 4, 7)]
    assert episode.leaves == {"proposer": (0, 3), "solver": (4, 7)}
    assert (episode.rewards, episode.may_speak) == ({"proposer": 0.25, "solver": 1.0}, ("proposer", "solver"))


async def test_without_its_teacher_an_episode_has_a_fault_of_the_infrastructure_and_no_reward(harness):
    def answer(request):
        lost = harness.rollout.failure(request, "the engine is gone", False)
        return [harness.rollout.result(request, "1") if request.scores is None else lost]

    harness.rollout.answer = answer
    (episode,) = await harness.play_document(taught(harness))
    assert (episode.fault, episode.fault_text) == (FaultClass.INFRA, "rollout-0: the engine is gone")
    assert (episode.rewards, episode.num_turns) == ({}, 5)


async def test_a_member_without_its_teacher_is_left_out_of_the_comparison_with_its_group(harness):
    def answer(request):
        if request.scores is None or request.member != 1:
            return [harness.rollout.result(request, "789"[request.member])]
        return [harness.rollout.failure(request, "the engine is gone", False)]

    harness.rollout.answer = answer
    episodes = await harness.play_document(taught(harness, "rogues:Ranks", ("policy",)), 3)
    assert [one.fault for one in episodes] == [None, FaultClass.INFRA, None]
    assert [one.rewards for one in episodes] == [{"policy": 0.0}, {}, {"policy": 1.0}]


def after(*names: tuple[str, int]):
    """Answers the given turns in this order, each with its own number, whenever they were asked for."""

    def answering(harness):
        held: dict[tuple[str, int], GenerateRequest] = {}
        left = list(names)

        def answer(request):
            held[request.agent, request.turn] = request
            replies = []
            while left and left[0] in held:
                replies.append(harness.rollout.result(held[left.pop(0)], "1"))
            return replies

        return answer

    return answering


A, B = 2 * BRANCH_TURNS, 4 * BRANCH_TURNS + 1
"""Numbers of the first turns of two parts: of agent a in the first and b in the second."""


@pytest.mark.parametrize(
    "order", [[("a", A), ("a", A + 2), ("b", B), ("b", B + 2)], [("b", B), ("b", B + 2), ("a", A), ("a", A + 2)]]
)
async def test_turns_of_parts_are_open_at_the_same_time_and_named_by_the_order_of_the_parts(harness, order):
    document = harness.document("rogues:both_at_once", agents=("a", "b"))
    harness.rollout.answer = after(*order)(harness)
    (episode,) = await harness.play_document(document)
    asked = sorted((request.agent, request.turn, request.parent) for request in harness.rollout.requests)
    assert asked == [("a", A, None), ("a", A + 2, A), ("b", B, None), ("b", B + 2, B)]
    assert (episode.fault, episode.num_turns) == (None, 4)
    assert episode.leaves == {"a": (A + 2,), "b": (B + 2,)}


async def test_an_agent_that_floods_has_its_turns_and_the_others_keep_their_rewards(harness):
    document = harness.document("rogues:floods_one_by_one", agents=("steady", "silent", "flood"))
    (episode,) = await harness.play_document(document)
    assert (episode.fault, episode.ending, episode.num_turns) == (None, Ending.MAX_TURNS, 5)
    assert episode.rewards == {"steady": 0.5, "silent": 0.0, "flood": 0.25}
    assert {agent: len(leaves) for agent, leaves in episode.leaves.items()} == {"steady": 1, "flood": 1}


async def test_a_turn_that_fails_beside_another_ends_the_episode_and_the_other_is_cancelled(harness):
    document = harness.document("rogues:both_at_once", agents=("a", "b"))

    def answer(request):
        if len(harness.rollout.requests) < 2:
            return []
        return [harness.rollout.failure(request, "no such engine", False)]

    harness.rollout.answer = answer
    (episode,) = await harness.play_document(document)
    assert (episode.fault, episode.fault_text) == (FaultClass.INFRA, "rollout-0: no such engine")
    assert [cancel.episode for cancel in harness.rollout.cancelled] == [episode.episode]


async def test_a_child_that_dies_while_two_turns_are_open_is_a_fault_of_its_own(harness, tmp_path):
    document = harness.document(
        "rogues:dies_at_once", agents=("a", "b"), args={"file": str(tmp_path / "both are open")}
    )
    harness.rollout.answer = lambda request: []
    async with harness.open(document):
        await harness.put_task(harness.task(document))
        await harness.rollout.until(lambda: {request.agent for request in harness.rollout.requests} == {"a", "b"})
        (tmp_path / "both are open").touch()
        (episode,) = await harness.episodes(1)
    assert episode.fault is FaultClass.ENV
    assert {cancel.agent for cancel in harness.rollout.cancelled} == {"a", "b"}


@pytest.mark.parametrize(("name", "args", "ending", "named"), rows(__file__, "speakers"))
async def test_an_episode_names_the_agents_that_its_task_may_call_unless_all(harness, name, args, ending, named):
    document = harness.document(f"rogues:{name}", agents=("a", "b"), args=args)
    (episode,) = await harness.play_document(document)
    assert (episode.fault, episode.ending, episode.may_speak) == (None, ending, tuple(named))


CALL = ReplyPartsMessage(content="", tool_calls=(ToolCallMessage(name="add", arguments="{}"),), raw="<a><b>")


async def test_tools_and_their_answers_travel_to_the_rollout_role(harness):
    def answer(request):
        reply = harness.rollout.result(request, "3")
        return [reply.model_copy(update={"num_prompt_tokens": 40, "parts": None if request.parent == 0 else CALL})]

    harness.rollout.answer = answer
    document = harness.document("rogues:uses_a_tool")
    rollout = document.spec.rollout.model_copy(update={"temperature": 0.5})
    document = document.model_copy(update={"spec": document.spec.model_copy(update={"rollout": rollout})})
    (episode,) = await harness.play_document(document)
    first, second = harness.rollout.requests
    assert episode.rewards == {"policy": 43.0}, episode.fault_text
    assert json.loads(first.tools[0])["function"]["name"] == "add"
    assert (second.parent, second.tools) == (0, None)
    assert second.append == (ChatMessage(role="tool", content="3", tool_call_id="call_0_0"),)
    assert episode.leaves == {"policy": (1,)}


ROUNDS = 200


def answer(agent, number):
    return encode_frame(
        {"kind": "reply", "agent": agent, "turn": number, "text": f"{agent}{number}", "stop_reason": "stop"}
        | {"num_tokens": 1, "num_prompt_tokens": 1, "opening": ""}
    )


def test_an_answer_reaches_its_thread_while_another_ones_is_awaited():
    """Thread a waits for its only turn until b has had all of its turns, one after another: whoever reads must let b go on."""
    ours, theirs = socket.socketpair()
    channel = SupervisorChannel(ours)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    theirs.settimeout(20)

    def speak(agent, turns):
        return [channel.turn(TurnRequest(agent, None, "x", number=number)).text for number in range(turns)]

    try:
        with ThreadPoolExecutor(2) as threads, theirs:
            spoken = [threads.submit(speak, *of) for of in (("a", 1), ("b", ROUNDS))]
            asked = 0
            while asked < ROUNDS:
                request = receive_frame(theirs)
                if request["agent"] == "b":
                    asked += 1
                    theirs.sendall(answer("b", request["number"]))
            theirs.sendall(answer("a", 0))
            assert [one.result(20) for one in spoken] == [["a0"], [f"b{number}" for number in range(ROUNDS)]]
    finally:
        sys.setswitchinterval(before)
        ours.close()


def test_all_waiting_threads_learn_that_the_connection_is_closed():
    ours, theirs = socket.socketpair()
    channel = SupervisorChannel(ours)
    theirs.settimeout(20)
    with ours, ThreadPoolExecutor(3) as threads:
        turns = [threads.submit(channel.turn, TurnRequest(agent, None, "x")) for agent in ("a", "b", "c")]
        for _ in turns:
            receive_frame(theirs)
        theirs.close()
        assert all(isinstance(turn.exception(20), EOFError) for turn in turns)


@pytest.mark.parametrize(("ended", "fault", "by_policy"), rows(__file__, "exits"))
def test_the_exit_of_a_child_determines_the_fault(ended, fault, by_policy):
    found = fault_of_exit(Ended(*ended), "64Mi")
    assert (found.fault, found.by_policy) == (fault, by_policy)
