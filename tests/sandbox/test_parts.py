"""Turns of several agents, of parts that run at the same time and behind the OpenAI door; their numbers, limits and candidates; the exit of a child."""

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
    StopReason,
    ToolCallMessage,
)
from marlaas_api.messages.training_settings import DistillationSettings
from marlaas_api.names import BRANCH_TURNS, MAX_TURNS_FACTOR, SCORES
from marlaas_worker.sandbox.channel import SupervisorChannel, encode_frame, receive_frame
from marlaas_worker.sandbox.faults import fault_of_exit
from marlaas_worker.sandbox.ledger import BadChildMessage, ScoreMessage, TurnLedger, TurnMessage, parse
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


AGENTS = ("a", "b", "c")


def asked(agent, number=0, parent=None, num_before=None):
    before = number % BRANCH_TURNS if num_before is None else num_before
    fields = {"kind": "turn", "append": "x", "max_tokens": None}
    return TurnMessage(agent=agent, number=number, num_before=before, parent=parent, **fields)


def test_a_task_is_known_by_its_first_prompt_and_what_it_draws_and_cut_replies_are_counted():
    book = TurnLedger(AGENTS, 9)
    assert book.prompt("drawn") == ""
    for number, stop in enumerate((StopReason.STOP, StopReason.LENGTH, StopReason.CONTEXT)):
        turn = asked("a", number, number - 1 if number else None)
        book.begin(turn)
        book.end(turn, stop, 5)
    other = TurnLedger(AGENTS, 9)
    other.begin(asked("a"))
    assert (book.num_tokens, book.num_cut) == (15, 2)
    assert book.prompt("drawn") == other.prompt("drawn") != other.prompt("")


def scored(ending="completed"):
    return ScoreMessage.model_validate({"kind": "score", "rewards": {}, "metrics": {}, "ending": ending, "tool_s": 0.0})


def ledger(*turns: tuple[str, int, int | None], max_turns=9, last=StopReason.STOP):
    book = TurnLedger(AGENTS, max_turns)
    for agent, number, parent in turns:
        assert book.begin(asked(agent, number, parent))
        book.end(asked(agent, number, parent), last)
    return book


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (3, 0, 1, 5, 2, 4), (0, 2, 3, 1, 5, 4)])
def test_leaves_are_the_turns_from_which_none_goes_on_in_whatever_order_they_came(order):
    turns = [("a", 0, None), ("a", 1, 0), ("a", 2, 0), ("b", 0, None), ("b", BRANCH_TURNS, 0), ("b", 1, None)]
    assert ledger(*(turns[place] for place in order)).leaves() == {"a": (3, 6), "b": (4, 3 * BRANCH_TURNS + 1)}


@pytest.mark.parametrize("turn", rows(__file__, "wrong_turns"))
def test_numbers_of_turns_are_checked_and_an_agent_goes_on_from_its_own_turns_only(turn):
    book = ledger(("a", 0, None), ("b", 0, None), ("a", 1, 0), ("b", 1, 0), ("b", 2, 1))
    with pytest.raises(BadChildMessage, match=r"names its turn|not one of its turns"):
        book.begin(asked("a", *turn))


def test_turns_are_limited_for_each_agent_on_its_way_and_for_parts_together():
    book = ledger(("a", 0, None), ("a", 1, 0), ("b", 0, None), max_turns=2)
    assert book.begin(asked("b", 1, 0))
    assert not book.begin(asked("a", 2, 1))
    assert book.begin(asked("a", BRANCH_TURNS, 1, num_before=1))
    assert not book.begin(asked("a", 2 * BRANCH_TURNS, 1, num_before=2))
    assert not book.begin(asked("a", 3 * BRANCH_TURNS - 1)), "several may be beyond the limit at the same time"
    book = ledger(*(("a", branch * BRANCH_TURNS, None) for branch in range(MAX_TURNS_FACTOR)), max_turns=1)
    with pytest.raises(BadChildMessage, match=r"16 times rollout\.maxTurns"):
        book.begin(asked("a", MAX_TURNS_FACTOR * BRANCH_TURNS))


def test_an_ending_is_what_the_supervisor_saw():
    assert ledger(("a", 0, None)).ending(scored()) is Ending.COMPLETED
    assert ledger(("a", 0, None), last=StopReason.CONTEXT).ending(scored()) is Ending.MAX_TOKENS
    assert ledger(("a", 0, None), last=StopReason.LENGTH).ending(scored("tool_error")) is Ending.TOOL_ERROR
    full = ledger(("a", 0, None), max_turns=1, last=StopReason.LENGTH)
    full.begin(asked("a", 1, 0))
    assert full.ending(scored()) is Ending.MAX_TURNS


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_ending_of_parts_depends_on_their_order_and_not_on_their_pace(order):
    stops = {1: StopReason.LENGTH, 2: StopReason.STOP}
    book = TurnLedger(AGENTS, 9)
    for branch in order:
        book.begin(asked("a", branch * BRANCH_TURNS))
        book.end(asked("a", branch * BRANCH_TURNS), stops[branch])
    assert book.ending(scored()) is Ending.COMPLETED


@pytest.mark.parametrize(("ended", "fault", "by_policy"), rows(__file__, "exits"))
def test_the_exit_of_a_child_determines_the_fault(ended, fault, by_policy):
    found = fault_of_exit(Ended(*ended), "64Mi")
    assert (found.fault, found.by_policy) == (fault, by_policy)


@pytest.mark.parametrize("body", rows(__file__, "messages"))
def test_messages_of_a_child_are_validated(body):
    with pytest.raises(BadChildMessage):
        parse(body.encode(), ("a",))


def test_an_agent_that_the_task_may_not_call_has_no_turn_and_the_agents_are_named_before_the_first_one():
    book = TurnLedger(AGENTS, 9)
    book.limit(["a"])
    assert book.begin(asked("a", 0, None))
    with pytest.raises(BadChildMessage, match="agent 'b', which the task may not call"):
        book.begin(asked("b", 0, None))
    with pytest.raises(BadChildMessage, match="named after its first turn"):
        book.limit(["a", "b"])


def candidate(number, choice=0, parent=None, agent="a"):
    return asked(agent, number, parent).model_copy(update={"choice": choice})


def rewarded(turns=(), **rewards: list[float]):
    choices = [{"number": int(name[1:]), "rewards": values} for name, values in rewards.items()]
    fields = {"kind": "score", "rewards": {}, "metrics": {}, "ending": "completed", "tool_s": 0.0}
    of_turns = [dict(zip(("agent", "turn", "reward"), turn, strict=True)) for turn in turns]
    return ScoreMessage.model_validate({**fields, "choices": choices, "turn_rewards": of_turns})


@pytest.mark.parametrize("turn", [("a", 9), ("b", 1), ("a", BRANCH_TURNS)], ids=["no turn", "another's", "a candidate"])
def test_each_turn_but_a_candidate_has_a_reward_which_is_zero_unless_it_is_set(turn):
    book = ledger(("a", 0, None), ("a", 1, 0), ("b", 0, None))
    book.end(candidate(BRANCH_TURNS, parent=1), StopReason.STOP)
    book.reward(rewarded([("a", 1, 0.5)], c0=[0.0]))
    found = {agent: [(one.turn, one.reward) for one in own] for agent, own in book.turn_rewards().items()}
    assert found == {"a": [(0, 0.0), (3, 0.5)], "b": [(1, 0.0)]}
    with pytest.raises(BadChildMessage, match="has no such turn"):
        book.reward(rewarded([(*turn, 1.0)], c0=[0.0]))


def chosen(*candidates: TurnMessage):
    book = TurnLedger(AGENTS, 9)
    for one in candidates:
        assert book.begin(one)
    for one in candidates:
        book.end(one, StopReason.STOP)
    return book


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0)])
def test_candidates_are_kept_by_choice_in_the_order_of_their_turns(order, first, second):
    """The numbers of choices are given in the order in which parts arrive."""
    turns = [candidate(BRANCH_TURNS, first), candidate(2 * BRANCH_TURNS, first), candidate(1, second, agent="b")]
    book = chosen(*(turns[place] for place in order))
    book.reward(rewarded(**{f"c{first}": [1.0, 2.0], f"c{second}": [3.0]}))
    found = [(one.agent, one.turns, one.rewards) for one in book.choices()]
    assert found == [("b", (4,), (3.0,)), ("a", (3 * BRANCH_TURNS, 6 * BRANCH_TURNS), (1.0, 2.0))]


@pytest.mark.parametrize("other", [candidate(1, agent="b"), candidate(1, parent=0)], ids=["agent", "state"])
def test_candidates_of_one_choice_are_of_one_agent_in_one_state(other):
    book = TurnLedger(AGENTS, 9)
    for one in (asked("a", 0), candidate(BRANCH_TURNS)):
        book.begin(one)
        book.end(one, StopReason.STOP)
    with pytest.raises(BadChildMessage, match="choice 0 has candidates of different agents or after different turns"):
        book.begin(other)


@pytest.mark.parametrize("rewards", [{"c0": [1.0]}, {"c0": [1.0, 2.0, 3.0]}, {"c1": [1.0]}])
def test_each_generated_candidate_has_one_reward(rewards):
    with pytest.raises(BadChildMessage, match="rewards for the candidates of choice"):
        chosen(candidate(0), candidate(BRANCH_TURNS)).reward(rewarded(**rewards))
