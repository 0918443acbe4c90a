"""The OpenAI door in an episode's own process: what crosses the pipe and the bus."""

import json

from marlaas_api.messages import ChatMessage

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
