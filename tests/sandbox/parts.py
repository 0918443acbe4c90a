"""Environments of several agents, and of parts that run at the same time. Imported by sandbox children only."""

import os
import signal
import time
from pathlib import Path


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


def floods_one_by_one(task, agents):
    agents.steady.say("hi")
    agents.steady.reward = 0.5
    agents.flood.reward = 0.25
    while True:
        agents.flood.say("on")


def dies_at_once(task, agents, file=""):
    with agents.together() as at_once:
        for agent in agents.values():
            at_once.run(agent.say, "hi")
        while not Path(file).exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGSEGV)


def calls_the_first(task, agents, end=""):
    agents.a.reward = 0.25
    agents.a.say("?")
    with agents.a.tool():
        if end:
            os._exit(1)
    return 1.0


calls_the_first.agents_of = lambda task, end="": ("a",)
