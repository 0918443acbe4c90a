"""An `async def play`: turns are awaited, parts are tasks, and numbers, limits and errors are those of the same code in threads."""

import asyncio

import pytest
from tests.environment.playing import AFTER, FIRST, ORDERS, SECOND, Held, Meeting, OrderedReplies, played
from tests.tables import rows

from marlaas.environment import ToolError, TurnLimit
from marlaas_api.errors import InvalidInput


def threads(task, agents):
    first = agents.a.say("one")

    def part(agent):
        agent.say("two")
        return agent.fork(first if agent.name == "a" else None).say("three").text

    with agents.together() as at_once:
        parts = [at_once.run(part, agent) for agent in agents.values()]
    texts = [one.result for one in parts]
    best = agents.b.branch("four", 3)[1]
    best.reward = 0.5
    return float(len("".join([*texts, best.go_on().complete("five").text])))


async def tasks(task, agents):
    first = await agents.a.say("one")

    async def part(agent):
        await agent.say("two")
        return (await agent.fork(first if agent.name == "a" else None).say("three")).text

    async with agents.together() as at_once:
        parts = [at_once.run(part, agent) for agent in agents.values()]
    texts = [one.result for one in parts]
    best = (await agents.b.branch("four", 3))[1]
    best.reward = 0.5
    return float(len("".join([*texts, (await best.go_on().complete("five")).text])))


@pytest.mark.parametrize("order", ORDERS)
def test_an_episode_has_the_same_turns_in_tasks_as_in_threads_whatever_their_pace(order):
    threaded, awaited = OrderedReplies(), OrderedReplies(*order)
    outcome = played(threads, threaded)
    assert played(tasks, awaited) == outcome
    assert awaited.numbers() == threaded.numbers()
    assert outcome.choices == {0: [0.0, 0.5, 0.0]}
    assert {one.number: one.choice for one in awaited.requests} == {one.number: one.choice for one in threaded.requests}


async def in_parts(task, agents):
    async with agents.together() as at_once:
        for agent in agents.values():
            at_once.run(agent.say, "hi")


async def gathered(task, agents):
    await asyncio.gather(*(agent.say("hi") for agent in agents.values()))


async def gathered_in_one_agent(task, agents):
    await asyncio.gather(agents.a.say("hi"), agents.a.begin().say("hi"))


async def candidates(task, agents):
    await agents.a.branch("hi", 2)


async def candidates_in_a_part(task, agents):
    async with agents.together() as at_once:
        at_once.run(agents.a.branch, "hi", 2)


@pytest.mark.parametrize(
    ("code", "is_strict", "numbers"),
    [
        (in_parts, True, {"a": [FIRST], "b": [SECOND]}),
        (candidates, True, {"a": [FIRST, SECOND]}),
        (candidates_in_a_part, True, {"a": [FIRST, FIRST + 1]}),
        (gathered, False, {"a": [0], "b": [0]}),
        (gathered_in_one_agent, False, {"a": [0, 1]}),
    ],
)
def test_turns_really_are_open_at_the_same_time(code, is_strict, numbers):
    channel = Meeting(2)
    played(code, channel, is_strict=is_strict)
    assert {agent: [number for number, _ in turns] for agent, turns in channel.numbers().items()} == numbers


async def one_conversation_in_two_parts(task, agents):
    async with agents.together() as at_once:
        at_once.run(agents.a.say, "one")
        at_once.run(agents.a.say, "two")


async def a_task_within_a_part(task, agents):
    async with agents.together() as at_once:
        at_once.run(gathered, task, agents)


async def two_turns_of_a_conversation_in_any_job(task, agents):
    await asyncio.gather(agents.a.say("one"), agents.a.say("two"))


@pytest.mark.parametrize(("code", "words"), rows(__file__, "strict_tasks"))
def test_what_would_make_a_strict_episode_depend_on_its_tasks_is_refused(code, words):
    with pytest.raises(InvalidInput, match=words):
        played(globals()[code], is_strict="in_any_job" not in code)


def test_the_first_parts_error_is_raised_and_all_parts_have_ended():
    ended: list[str] = []

    async def both(task, agents):
        second_failed = asyncio.Event()

        async def first():
            await second_failed.wait()
            await agents.a.say("on")
            ended.append("first")
            raise KeyError("first")

        async def second():
            second_failed.set()
            raise ValueError("second")

        try:
            async with agents.together() as at_once:
                at_once.run(first)
                at_once.run(second)
        finally:
            ended.append(str((await agents.a.say("on")).turn))

    with pytest.raises(KeyError, match="first"):
        played(both)
    assert ended == ["first", str(AFTER)]


def test_a_turn_that_has_begun_is_part_of_the_episode_also_if_its_task_is_cancelled():
    channel = Held()

    async def impatient(task, agents):
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

    async def impatient(task, agents):
        asked = asyncio.Event()

        async def speak():
            asked.set()
            try:
                await agents.a.say("hi")
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ends.append("part")
                raise

        async def block():
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


async def until_the_limit(task, agents):
    agents.a.reward = 0.25
    while True:
        await agents.a.say("on")


async def in_a_group(task, agents):
    agents.a.reward = 0.25
    async with asyncio.TaskGroup() as group:
        group.create_task(until_the_limit(task, agents))


async def broken_tool(task, agents):
    agents.a.reward = 0.25
    async with agents.a.tool():
        raise KeyError("x")


async def slow_tool(task, agents):
    agents.a.reward = 0.25
    async with agents.a.tool(timeout_s=0.01):
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("code", "ending"),
    [(until_the_limit, "max_turns"), (in_a_group, "max_turns"), (broken_tool, "tool_error"), (slow_tool, "tool_error")],
)
def test_what_the_policy_causes_is_scored(code, ending):
    outcome = played(code, OrderedReplies(max_turns=2), is_strict=code is not in_a_group)
    assert (outcome.ending, outcome.rewards) == (ending, {"a": 0.25, "b": 0.0})


def test_the_environment_is_told_how_its_tool_failed():
    async def told(task, agents):
        with pytest.raises(ToolError, match=r"TimeoutError: the tool took longer than 0\.01 s"):
            async with agents.a.tool(timeout_s=0.01):
                await asyncio.Event().wait()
        with pytest.raises(ToolError, match="TimeoutError: its own"):
            async with agents.a.tool(timeout_s=60):
                raise TimeoutError("its own")

    played(told)


def test_an_error_of_the_environment_beside_the_limit_is_a_fault():
    async def mixed(task, agents):
        raise BaseExceptionGroup("both", [TurnLimit("x"), ValueError("mine")])

    with pytest.raises(BaseExceptionGroup, match="both"):
        played(mixed)
