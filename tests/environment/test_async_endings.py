"""Endings of episodes whose `play` is a coroutine: the turn limit, a tool, an error, a cancellation."""

import asyncio
from typing import Any

import pytest
from tests.environment.channels import FIRST, SECOND, Held, OrderedReplies
from tests.environment.playing import played

from marlaas.environment import Task, ToolError, TurnLimit


def test_a_turn_that_has_begun_is_part_of_the_episode_also_if_its_task_is_cancelled():
    channel = Held()

    async def impatient(task: Task, agents: Any) -> float:
        speaking = asyncio.create_task(agents.a.say("hi"))
        assert await asyncio.to_thread(channel.asked.acquire, timeout=30)
        speaking.cancel()
        await asyncio.sleep(0)
        still_speaks = not speaking.done()
        channel.may_answer.set()
        with pytest.raises(asyncio.CancelledError):
            await speaking
        return float(still_speaks)

    assert played(impatient, channel, is_strict=False).rewards["a"] == 1.0
    assert len(channel.requests) == 1


def test_a_cancelled_block_cancels_its_parts_and_waits_for_their_turns():
    channel = OrderedReplies()
    ends: list[str] = []

    async def impatient(task: Task, agents: Any) -> None:
        asked = asyncio.Event()

        async def speak() -> None:
            asked.set()
            try:
                await agents.a.say("hi")
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ends.append("part")
                raise

        async def block() -> None:
            async with asyncio.timeout(60) as limit, agents.together() as at_once:
                at_once.run(speak)
                await asked.wait()
                limit.reschedule(0)

        with pytest.raises(TimeoutError):
            await block()
        ends.append(str((await agents.a.say("on")).turn))

    played(impatient, channel)
    assert ends == ["part", str(SECOND)]
    assert channel.numbers()["a"][0][0] == FIRST


async def until_the_limit(task: Task, agents: Any) -> None:
    agents.a.reward = 0.25
    while True:
        await agents.a.say("on")


async def in_a_group(task: Task, agents: Any) -> None:
    agents.a.reward = 0.25
    async with asyncio.TaskGroup() as group:
        group.create_task(until_the_limit(task, agents))


async def broken_tool(task: Task, agents: Any) -> None:
    agents.a.reward = 0.25
    async with agents.a.tool():
        raise KeyError("x")


async def slow_tool(task: Task, agents: Any) -> None:
    agents.a.reward = 0.25
    async with agents.a.tool(timeout_s=0.01):
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (until_the_limit, "max_turns"),
        (in_a_group, "max_turns"),
        (broken_tool, "tool_error"),
        (slow_tool, "tool_error"),
    ],
)
def test_what_the_policy_causes_is_scored(code, ending):
    outcome = played(code, OrderedReplies(max_turns=2), is_strict=code is not in_a_group)
    assert (outcome.ending, outcome.rewards) == (ending, {"a": 0.25, "b": 0.0})


def test_the_environment_is_told_how_its_tool_failed():
    async def told(task: Task, agents: Any) -> None:
        with pytest.raises(ToolError, match=r"TimeoutError: the tool took longer than 0\.01 s"):
            async with agents.a.tool(timeout_s=0.01):
                await asyncio.Event().wait()
        with pytest.raises(ToolError, match="TimeoutError: its own"):
            async with agents.a.tool(timeout_s=60):
                raise TimeoutError("its own")

    played(told)


def test_an_error_of_the_environment_beside_the_limit_is_a_fault():
    async def mixed(task: Task, agents: Any) -> None:
        raise BaseExceptionGroup("both", [TurnLimit("x"), ValueError("mine")])

    with pytest.raises(BaseExceptionGroup, match="both"):
        played(mixed)
