"""One agent written twice: with the SDK, and against a chat-completions client. Imported by sandbox children.

It computes with a tool in two branches; with a streak of calls it runs out of turns.
"""

from openai import OpenAI

from marlaas.environment import Message
from marlaas.envs.extraction import last_number
from marlaas.models.curriculum import TOOL_ERROR, calculator_task, requested_expression, tool_reply
from marlaas_api.names import derive_seed

BRANCHES = 2


def _puzzle(task):
    return calculator_task(task.split, derive_seed(task.seed, task.index))


def native(task, agent):
    puzzle = _puzzle(task)
    branches = [agent.begin() for _ in range(BRANCHES)]
    replies = [branch.say(puzzle.prompt, max_tokens=14) for branch in branches]
    for branch, reply in zip(branches, replies, strict=True):
        text = reply.text
        while (expression := requested_expression(text)) is not None:
            result = tool_reply(expression)
            agent.reward += 0.125 * (result != TOOL_ERROR)
            text = branch.ask(Message("tool", result)).text
        agent.reward += float(last_number(text) == puzzle.answer)


def chat(task, agent):
    puzzle = _puzzle(task)
    with agent.openai() as door, OpenAI(base_url=door.base_url, api_key=door.api_key) as client:
        asked = [{"role": "user", "content": puzzle.prompt}]
        first = client.chat.completions.create(
            model="policy", messages=asked, n=BRANCHES, max_tokens=14, temperature=1.0
        )
        for choice in first.choices:
            messages, text = [*asked, choice.message], choice.message.content
            while (expression := requested_expression(text)) is not None:
                result = tool_reply(expression)
                agent.reward += 0.125 * (result != TOOL_ERROR)
                messages.append({"role": "tool", "content": result})
                chunks = client.chat.completions.create(model="policy", messages=messages, stream=True)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                messages.append({"role": "assistant", "content": text})
            agent.reward += float(last_number(text) == puzzle.answer)
