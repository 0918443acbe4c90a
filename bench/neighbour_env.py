"""Environments of bad neighbours, for `bench neighbours`; found on PYTHONPATH."""

import time

from marlaas.environment import Agent, Score, Task


def hanging(task: Task, agent: Agent) -> Score:
    """Never answer after the first turn."""
    agent.say(f"{task.index}+1=?")
    time.sleep(10_000)
    return Score(0.0)


def busy(task: Task, agent: Agent) -> Score:
    """Compute for ten seconds between two turns."""
    agent.say(f"{task.index}+1=?")
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        pass
    return Score(float(len(agent.say("and?").text) % 2))


def giant(task: Task, agent: Agent) -> Score:
    """Send a prompt that nearly fills the context, different in each episode."""
    reply = agent.say((f"{task.index:06} " * 60)[:400])
    return Score(float(len(reply.text) % 2))


def flood(task: Task, agent: Agent) -> Score:
    """Take as many short turns as allowed."""
    reward = 0.0
    while True:
        reward = float(len(agent.say("x").text) % 2)
        agent.reward = reward
