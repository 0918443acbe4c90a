"""Environments of several agents, and of parts that run at the same time. Imported by sandbox children only."""

import asyncio
import os
import signal
import time

from marlaas.environment import TurnLimit


class TwoAgents:
    def play(self, task, agents):
        question = agents["proposer"].say("ask").text
        first = agents["solver"].say(question)
        agents["solver"].fork().say("again")
        agents["solver"].say("and again")
        agents["proposer"].begin().say("afresh")
        return {"proposer": 0.25, "solver": float(len(first.text))}


def both_at_once(task, agents):
    def twice(agent):
        return float(agent.say("one").text) + float(agent.say("two").text)

    with agents.together() as at_once:
        parts = {name: at_once.run(twice, agent) for name, agent in agents.items()}
    return {name: part.result for name, part in parts.items()}


async def both_in_tasks(task, agents):
    async def twice(agent):
        return float((await agent.say("one")).text) + float((await agent.say("two")).text)

    async with agents.together() as at_once:
        parts = {name: at_once.run(twice, agent) for name, agent in agents.items()}
    return {name: part.result for name, part in parts.items()}


async def many_at_once(task, agent, turns=40):
    """In an asynchronous job undeclared tasks may speak."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(agent.begin().say(str(number))) for number in range(turns)]
    return float(sum(task.result().turn for task in tasks))


def chooses_beyond_the_limit(task, agent):
    """A part has 4 turns: 2 candidates, 1 turn, no 2 candidates any more, and 1 turn."""

    def part():
        agent.branch("act", 2)[0].go_on().say("on")
        try:
            agent.branch("act again", 2)
        except TurnLimit:
            return agent.say("end").text

    with agent.together() as at_once:
        last = at_once.run(part)
    return float(last.result)


def floods_one_by_one(task, agents):
    agents.steady.say("hi")
    agents.steady.reward = 0.5
    agents.flood.reward = 0.25
    while True:
        agents.flood.say("on")


def floods_in_parts(task, agents):
    """`flood` speaks in more parts than an agent may have turns; `steady` has spoken once."""
    agents.steady.say("hi")
    with agents.together() as at_once:
        for _ in range(200):
            at_once.run(agents.flood.begin().say, "on")


def dies_at_once(task, agents):
    with agents.together() as at_once:
        for agent in agents.values():
            at_once.run(agent.say, "hi")
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGSEGV)


def calls_the_first(task, agents, end=""):
    agents.a.reward = 0.25
    agents.a.say("?")
    with agents.a.tool():
        if end:
            os._exit(1)
    return 1.0


calls_the_first.agents_of = lambda task, end="": ("a",)
