"""A team of two agents that do not depend on each other, for `bench agents --only digests`; found on PYTHONPATH."""

from marlaas.environment import Agent, Agents, Task


def _plays(task: Task, agent: Agent) -> float:
    """Take two turns, and one more from between them. Nearly no two episodes have the same reward."""
    first = agent.say(f"reverse: {task.index}")
    agent.say("again")
    branch = agent.fork(first).say("once more")
    return sum(map(ord, first.text + branch.text)) % 97 / 97


def at_once(task: Task, agents: Agents) -> dict[str, float]:
    """Let all agents play at the same time, each two parts of its own."""
    return _played(task, agents, tuple(agents))


class Alone:
    """As `at_once`, but only the agent `speaker` speaks; its parts have the numbers that they have in the team."""

    def __init__(self, speaker: str) -> None:
        self.speaker = speaker

    def play(self, task: Task, agents: Agents) -> dict[str, float]:
        return _played(task, agents, (self.speaker,))


def _played(task: Task, agents: Agents, speakers: tuple[str, ...]) -> dict[str, float]:
    parts = {}
    with agents.together() as block:
        for name, agent in agents.items():
            play = _plays if name in speakers else _nothing
            parts[name] = [block.run(play, task, agent), block.run(play, task, agent.begin())]
    return {name: first.result + second.result for name, (first, second) in parts.items()}


def _nothing(task: Task, agent: Agent) -> float:
    return 0.0
