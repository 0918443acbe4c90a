"""Tools through the OpenAI server, and the turn limit behind it, as several kinds of agents' code handle it."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tests.environment.playing import first_task
from tests.environment.servers import ADD, CALL, client_of, create, opened, user

from marlaas.environment import Agent, Message, Task
from marlaas.envs.loading import Environment
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies, ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas.openai_server import OpenAIServer


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_answered(stream: bool) -> None:
    with opened(f"Let me see.\n{CALL}", "3") as (_, client, asked):
        if stream:
            with client.chat.completions.stream(model="policy", messages=[user("1 + 2")], tools=[ADD]) as events:
                first = events.get_final_completion().choices[0]
        else:
            first = create(client, user("1 + 2"), tools=[ADD]).choices[0]
        (call,) = first.message.tool_calls
        assert (first.finish_reason, first.message.content) == ("tool_calls", "Let me see.")
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
        said = {"role": "assistant", "content": first.message.content, "tool_calls": [call.model_dump()]}
        answer = {"role": "tool", "content": "3", "tool_call_id": call.id}
        assert create(client, user("1 + 2"), said, answer, tools=[ADD]).choices[0].message.content == "3"
    assert [one.request.parent for one in asked] == [None, 0]
    assert [one.request.tools and json.loads(one.request.tools[0]) for one in asked] == [ADD, None]
    assert asked[1].request.append == (Message("tool", "3", tool_call_id=call.id),)


def test_a_call_that_a_client_printed_anew_is_the_same_call() -> None:
    with opened(CALL, "3") as (_, client, asked):
        (call,) = create(client, user("1 + 2"), tools=[ADD]).choices[0].message.tool_calls
        again = call.model_dump()
        again["function"]["arguments"] = json.dumps({"a": 1, "b": 2}, indent=2)
        said = {"role": "assistant", "content": None, "tool_calls": [again]}
        create(client, user("1 + 2"), said, user("go on"), tools=[ADD])
    assert asked[1].request.parent == 0


@pytest.mark.parametrize(
    ("reply", "names"),
    [
        (CALL, ["add"]),
        (CALL + CALL, ["add", "add"]),
        (CALL.removesuffix("</tool_call>"), ["add"]),
        ('{"name": "add", "parameters": {"a": 1}}', ["add"]),
        ('[{"name": "add", "arguments": "{}"}]', ["add"]),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', ["other"]),
    ],
)
def test_calls_are_read(reply: str, names: list[str]) -> None:
    with opened(reply) as (_, client, _):
        choice = create(client, user("x"), tools=[ADD]).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert [call.function.name for call in choice.message.tool_calls] == names


@pytest.mark.parametrize(
    "reply",
    [
        '<tool_call>{"name": "add", "arguments": {"a": </tool_call>',
        '<tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>"add"</tool_call>',
        CALL + "<tool_call>",
        '{"name": "somebody", "arguments": {}}',
        '{"answer": 3}',
        "[]",
        "3",
    ],
)
def test_what_is_no_call_is_text(reply: str) -> None:
    with opened(reply) as (_, client, _):
        choice = create(client, user("x"), tools=[ADD]).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", reply, None)


def test_calls_are_not_looked_for_without_tools_or_if_none_is_wanted() -> None:
    with opened(CALL, CALL) as (_, client, _):
        assert create(client, user("x")).choices[0].message.content == CALL
        assert create(client, user("x"), tools=[ADD], tool_choice="none").choices[0].message.content == CALL


def play(code: Any, *replies: str, max_turns: int = 9) -> tuple[Outcome, RecordedReplies]:
    channel = ScriptedReplies(replies, max_turns)
    return play_episode(Environment(code, False), first_task(), EpisodeState(["policy"], channel)), channel


def endless(task: Task, agent: Agent) -> None:
    with agent.openai() as server, client_of(server) as client:
        while True:
            create(client, user("on"))
            agent.reward += 0.25


def framework(task: Task, agent: Agent) -> None:
    with agent.openai() as server, client_of(server) as client:
        create(client, user("on"))
        agent.reward += 0.5
        try:
            create(client, user("on"), n=5)
        except openai.PermissionDeniedError as error:
            raise RuntimeError(f"the chain broke: {error.code == 'turn_limit'}") from None


def asynchronous(task: Task, agent: Agent) -> None:
    async def both(server: OpenAIServer) -> None:
        async with (
            AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(3):
                group.create_task(client.chat.completions.create(model="policy", messages=[user("on")]))

    with agent.openai() as server:
        agent.reward = 0.5
        asyncio.run(both(server))


@pytest.mark.parametrize("code", [endless, framework, asynchronous])
def test_running_out_of_turns_ends_the_episode_scored(code: Any) -> None:
    outcome, channel = play(code, "a", "b", "c", "d", max_turns=2)
    assert (outcome.ending, outcome.rewards) == ("max_turns", {"policy": 0.5})
    assert len(channel.asked) == (1 if code is framework else 2), "of several choices all are generated, or none"
