"""The turn limit behind the OpenAI server, for several ways in which an agent's code handles it."""

import asyncio
from contextlib import suppress
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from tests.environment.servers import client_of, create, user

from marlaas.environment import Agent, EpisodeState, Split, Task, TurnLimit
from marlaas.envs.loading import Environment
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies, ScriptedReplies
from marlaas.openai_server import OpenAIServer


def play(code: Any, *replies: str, max_turns: int = 9) -> tuple[Outcome, RecordedReplies]:
    channel = ScriptedReplies(replies, max_turns)
    outcome = play_episode(Environment(code, False), Task(Split.TRAIN, 0, 7), EpisodeState(["policy"], channel))
    return outcome, channel


def endless(task: Task, agent: Agent) -> None:
    with agent.openai() as server, client_of(server) as client:
        while True:
            create(client, user("on"))
            agent.reward += 0.25


def wrapping(task: Task, agent: Agent) -> None:
    try:
        endless(task, agent)
    except TurnLimit:
        raise
    raise AssertionError


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


def in_a_tool(task: Task, agent: Agent) -> None:
    with agent.openai() as server, client_of(server) as client:
        agent.reward = 0.5
        with agent.tool():
            while True:
                create(client, user("on"))


@pytest.mark.parametrize("code", [endless, wrapping, framework, asynchronous, in_a_tool])
def test_running_out_of_turns_ends_the_episode_scored(code: Any) -> None:
    outcome, channel = play(code, "a", "b", "c", "d", max_turns=2)
    assert (outcome.ending, outcome.rewards) == ("max_turns", {"policy": 0.5})
    assert len(channel.asked) == 2


def test_an_agent_may_handle_the_limit_itself() -> None:
    def careful(task: Task, agent: Agent) -> float:
        with agent.openai() as server, client_of(server) as client:
            try:
                create(client, user("on"), n=3)
            except openai.PermissionDeniedError:
                return 0.75
        return 0.0

    assert play(careful, "a", max_turns=1)[0].rewards == {"policy": 0.75}


def test_another_error_after_the_limit_is_the_environments() -> None:
    def careless(task: Task, agent: Agent) -> None:
        with agent.openai() as server, client_of(server) as client:
            with suppress(openai.PermissionDeniedError):
                create(client, user("on"), n=3)
            {}["missing"]

    with pytest.raises(KeyError):
        play(careless, "a", max_turns=1)
