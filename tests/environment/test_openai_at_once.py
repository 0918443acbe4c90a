"""Chat-completions requests that are open at the same time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tests.environment.channels import Held, Meeting
from tests.environment.servers import create, opened, user

from marlaas.envs.scripted import ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas.openai_server import OpenAIServer


def served(
    channel: Any, talk: Callable[[AsyncOpenAI], Awaitable[Any]], *agents: str, is_strict: bool = False
) -> list[Any]:
    async def run(server: OpenAIServer) -> Any:
        async with AsyncOpenAI(base_url=server.base_url, api_key=server.api_key) as client:
            return await talk(client)

    with OpenAIServer(EpisodeState(agents or ("a", "b"), channel, is_strict=is_strict)) as server:
        return asyncio.run(run(server))


async def two_turns(client: AsyncOpenAI, agent: str) -> list[str]:
    messages: list[Any] = [user(agent)]
    for text in ("and", "end"):
        reply = (await client.chat.completions.create(model=agent, messages=messages)).choices[0].message
        messages += [reply, user(text)]
    return [messages[1].content, messages[3].content]


def test_requests_of_an_asynchronous_job_are_sampled_at_the_same_time():
    """An agent's names count its own turns, so they do not depend on the pace of other agents."""
    channel = Meeting(2)

    async def both(client: AsyncOpenAI) -> Any:
        return await asyncio.gather(two_turns(client, "a"), two_turns(client, "b"))

    assert served(channel, both) == [["a0", "a1"], ["b0", "b1"]]
    assert channel.numbers() == {"a": [(0, None), (1, 0)], "b": [(0, None), (1, 0)]}


def test_in_a_strict_job_a_request_beside_another_one_is_refused_in_words():
    """Their order would be that of arrival."""
    channel = Held()

    async def both(client: AsyncOpenAI) -> Any:
        first = asyncio.create_task(client.chat.completions.create(model="a", messages=[user("x")]))
        assert await asyncio.to_thread(channel.asked.acquire, timeout=30)
        for agent in ("a", "b"):
            with pytest.raises(openai.BadRequestError, match="two turns were asked for at the same time") as caught:
                await client.chat.completions.create(model=agent, messages=[user("x")])
            assert caught.value.code == "not_allowed"
        channel.may_answer.set()
        await first
        return await client.chat.completions.create(model="b", messages=[user("x")])

    assert served(channel, both, is_strict=True).choices[0].message.content == "b0"
    assert channel.numbers() == {"a": [(0, None)], "b": [(0, None)]}


@pytest.mark.parametrize("is_strict", [True, False])
def test_several_choices_are_sampled_at_the_same_time_in_the_order_of_their_numbers(is_strict):
    async def ask(client: AsyncOpenAI) -> Any:
        answer = await client.chat.completions.create(model="a", messages=[user("x")], n=3)
        return [choice.message.content for choice in answer.choices]

    assert served(Meeting(3), ask, is_strict=is_strict) == ["a0", "a1", "a2"]


def test_of_several_choices_all_are_within_the_turn_limit_or_none_is_generated():
    channel = ScriptedReplies(["one", "two"])
    with opened(channel=channel) as (_, client, asked):
        with pytest.raises(openai.PermissionDeniedError, match="has used all of its 2 turns"):
            create(client, user("x"), n=3)
        assert asked == []
        assert len(create(client, user("x"), n=2).choices) == 2
