"""The OpenAI door in an episode's own process: what crosses the pipe and the bus."""

import json
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
async def test_a_taskset_of_the_verifiers_library_plays_in_a_child(harness, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "environment"))
    episodes = await harness.play("marlaas.verifiers:Verifiers", group_size=2, args={"taskset": "sums-taskset"})
    assert [episode.fault for episode in episodes] == [None, None], episodes[0].fault_text
    assert [set(episode.metrics) for episode in episodes] == [{"reward/right", "length"}] * 2
    assert len(harness.rollout.requests) == 2
