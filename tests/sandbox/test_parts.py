"""Turns of several agents, and of parts that run at the same time."""

from collections.abc import Callable

import pytest
from tests.sandbox.conftest import Answer, SandboxHarness

from marlaas_api.messages import Ending, FaultClass, GenerateReply, GenerateRequest
from marlaas_api.names import BRANCH_TURNS


async def test_turns_name_their_parents_and_the_last_replica_and_leaves_are_where_branches_end(harness):
    document = harness.document("parts:TwoAgents", agents=("proposer", "solver"))

    def answer(request):
        return [harness.rollout.result(request, "1").model_copy(update={"replica": f"of-turn-{request.turn}"})]

    harness.rollout.answer = answer
    (episode,) = await harness.play_document(document)
    asked = [(one.agent, one.turn, one.parent, one.last_replica) for one in harness.rollout.requests]
    assert asked == [
        ("proposer", 0, None, ""),
        ("solver", 1, None, ""),
        ("solver", 3, 1, "of-turn-1"),
        ("solver", 5, 1, "of-turn-3"),
        ("proposer", 2, None, "of-turn-0"),
    ]
    assert episode.leaves == {"proposer": (0, 2), "solver": (3, 5)}
    assert episode.rewards == {"proposer": 0.25, "solver": 1.0}


def after(*names: tuple[str, int]) -> Callable[[SandboxHarness], Answer]:
    """Answers the given turns in this order, each with its own number, whenever they were asked for."""

    def answering(harness: SandboxHarness) -> Answer:
        held: dict[tuple[str, int], GenerateRequest] = {}
        left = list(names)

        def answer(request: GenerateRequest) -> list[GenerateReply]:
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
    document = harness.document("parts:both_at_once", agents=("a", "b"))
    harness.rollout.answer = after(*order)(harness)
    (episode,) = await harness.play_document(document)
    assert sorted((request.agent, request.turn, request.parent) for request in harness.rollout.requests) == [
        ("a", A, None),
        ("a", A + 2, A),
        ("b", B, None),
        ("b", B + 2, B),
    ]
    assert (episode.fault, episode.num_turns) == (None, 4)
    assert episode.leaves == {"a": (A + 2,), "b": (B + 2,)}


async def test_an_agent_that_floods_has_its_turns_and_the_others_keep_their_rewards(harness):
    document = harness.document("parts:floods_one_by_one", agents=("steady", "silent", "flood"))
    (episode,) = await harness.play_document(document)
    assert (episode.fault, episode.ending, episode.num_turns) == (None, Ending.MAX_TURNS, 5)
    assert episode.rewards == {"steady": 0.5, "silent": 0.0, "flood": 0.25}
    assert {agent: len(leaves) for agent, leaves in episode.leaves.items()} == {"steady": 1, "flood": 1}


async def test_a_turn_that_fails_beside_another_ends_the_episode_and_the_other_is_cancelled(harness):
    document = harness.document("parts:both_at_once", agents=("a", "b"))

    def answer(request):
        if len(harness.rollout.requests) < 2:
            return []
        return [harness.rollout.failure(request, "no such engine", False)]

    harness.rollout.answer = answer
    (episode,) = await harness.play_document(document)
    assert (episode.fault, episode.fault_text) == (FaultClass.INFRA, "rollout-0: no such engine")
    assert [cancel.episode for cancel in harness.rollout.cancelled] == [episode.episode]


async def test_a_child_that_dies_while_two_turns_are_open_is_a_fault_of_its_own(harness, tmp_path):
    document = harness.document("parts:dies_at_once", agents=("a", "b"), args={"file": str(tmp_path / "both are open")})
    harness.rollout.answer = lambda request: []
    async with harness.open(document):
        await harness.put_task(harness.task(document))
        await harness.rollout.until(lambda: {request.agent for request in harness.rollout.requests} == {"a", "b"})
        (tmp_path / "both are open").touch()
        (episode,) = await harness.episodes(1)
    assert episode.fault is FaultClass.ENV
    assert {cancel.agent for cancel in harness.rollout.cancelled} == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "args", "ending", "named"),
    [
        ("calls_the_first", {}, Ending.COMPLETED, ("a",)),
        ("calls_the_first", {"end": "in its tool"}, Ending.TOOL_ERROR, ("a",)),
        ("both_at_once", {}, Ending.COMPLETED, ()),
    ],
)
async def test_an_episode_names_the_agents_that_its_task_may_call_unless_it_may_call_all(
    harness, name, args, ending, named
):
    document = harness.document(f"parts:{name}", agents=("a", "b"), args=args)
    (episode,) = await harness.play_document(document)
    assert (episode.fault, episode.ending, episode.may_speak) == (None, ending, named)
