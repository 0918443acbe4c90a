"""The OpenAI door in an episode's own process: what crosses the pipe and the bus."""

import json
import re
from pathlib import Path

import pytest

from marlaas_api.messages import ChatMessage, Ending, ToolCallMessage

CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


async def test_tools_and_their_answers_travel_to_the_rollout_role(harness):
    def answer(request):
        reply = harness.rollout.result(request, "3" if request.parent == 0 else CALL)
        return [reply.model_copy(update={"num_prompt_tokens": 40})]

    harness.rollout.answer = answer
    document = harness.document("chatters:uses_a_tool")
    rollout = document.spec.rollout.model_copy(update={"temperature": 0.5})
    document = document.model_copy(update={"spec": document.spec.model_copy(update={"rollout": rollout})})
    (episode,) = await harness.play_document(document)
    first, second = harness.rollout.requests
    assert episode.rewards == {"policy": 43.0}, episode.fault_text
    assert json.loads(first.tools[0])["function"]["name"] == "add"
    assert (second.parent, second.tools) == (0, None)
    assert second.append == (ChatMessage(role="tool", content="3", tool_call_id="call_0_0"),)
    assert episode.leaves == {"policy": (1,)}


async def test_a_conversation_may_begin_with_a_call(harness):
    (episode,) = await harness.play("chatters:begins_with_a_call")
    (request,) = harness.rollout.requests
    assert episode.fault is None, episode.fault_text
    assert request.append == (
        ChatMessage(
            role="assistant", content="", tool_calls=(ToolCallMessage(name="add", arguments='{"a": 1}', id="c1"),)
        ),
        ChatMessage(role="tool", content="3", name="add", tool_call_id="c1"),
    )


async def test_running_out_of_turns_behind_the_door_is_scored(harness):
    (episode,) = await harness.play("chatters:goes_on_for_ever")
    assert (episode.fault, episode.ending, episode.rewards) == (None, Ending.MAX_TURNS, {"policy": 0.5})
    assert episode.num_turns == 4


@pytest.mark.slow
async def test_a_multi_agent_environment_of_the_verifiers_library_plays_in_children(harness, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "environment"))
    agents = ("solver", "verifier")

    def total(request):
        return sum(map(int, re.findall(r"\d", request.append[-1].content)))

    def answer(request):
        return [harness.rollout.result(request, str(total(request)) if request.agent == "solver" else "right")]

    harness.rollout.answer = answer
    document = harness.document("marlaas.verifiers:VerifiersTeam", agents=agents, args={"taskset": "proof-taskset"})
    episodes = await harness.play_document(document, group_size=2)
    assert [episode.fault for episode in episodes] == [None, None], episodes[0].fault_text
    for episode in episodes:
        assert episode.rewards == {"solver": 1.0, "verifier": 0.5}
        assert episode.metrics == {"solver/reward/right": 1.0, "verifier/reward/found": 1.0}
        assert episode.leaves == {"solver": (0,), "verifier": (1,)}
        draft, verdict = (one for one in harness.rollout.requests if one.episode == episode.episode)
        assert (draft.agent, verdict.agent) == agents
        question = f"{draft.append[-1].content} {total(draft)}: right or wrong?"
        assert verdict.append == (ChatMessage(role="user", content=question),)
