"""Teams of two agents. Imported by sandbox children only."""


def _plays(task, agent):
    """Two turns and one more from between them; a reward that nearly no two episodes share."""
    first = agent.say(f"reverse: {task.index}")
    agent.say("again")
    branch = agent.fork(first).say("once more")
    return sum(map(ord, first.text + branch.text)) % 97 / 97


def at_once(task, agents):
    with agents.together() as block:
        parts = {
            name: [block.run(_plays, task, agent), block.run(_plays, task, agent.begin())]
            for name, agent in agents.items()
        }
    return {name: first.result + second.result for name, (first, second) in parts.items()}


def once(task, agents):
    with agents.together() as block:
        parts = {name: block.run(agent.say, f"reverse: {task.index}") for name, agent in agents.items()}
    return {name: sum(map(ord, part.result.text)) % 97 / 97 for name, part in parts.items()}


async def in_tasks(task, agents):
    async def plays(agent):
        first = await agent.say(f"reverse: {task.index}")
        await agent.say("again")
        branch = await agent.fork(first).say("once more")
        return sum(map(ord, first.text + branch.text)) % 97 / 97

    async with agents.together() as block:
        parts = {name: [block.run(plays, agent), block.run(plays, agent.begin())] for name, agent in agents.items()}
    return {name: first.result + second.result for name, (first, second) in parts.items()}


def unruly(task, agents):
    """`steady` speaks in every task, then `faulty` breaks every second one, and `flood` speaks until its turns are used up. `silent` is never called."""
    reply = agents.steady.say(f"reverse: {task.index}")
    if task.index % 2:
        broken = {"said": agents.faulty.say("what?").text}
        raise KeyError(f"faulty said {broken['nothing']}")
    agents.steady.reward = sum(map(ord, reply.text)) % 97 / 97
    while True:
        agents.flood.reward += sum(map(ord, agents.flood.say("on").text)) % 89 / 89


def choose(task, agent):
    """Goes on with the better of two candidates, and then with the two best of three."""
    text = agent.say(f"reverse: {task.index}").text
    for prompt, number in (("act", 2), ("act again", 3)):
        candidates = agent.branch(prompt, number)
        for candidate in candidates:
            candidate.reward = sum(map(ord, candidate.text)) % 89 / 89
        best, second, *_ = sorted(candidates, key=lambda one: one.reward, reverse=True)
        agent, text = best.go_on(), text + best.text
    ends = agent.say("end").text + second.go_on().say("end").text
    return sum(map(ord, text + ends)) % 97 / 97


class Alone:
    """As `at_once`, but only the agent `speaker` speaks; the numbers of its parts are those that it has in the team."""

    def __init__(self, speaker):
        self.speaker = speaker

    def play(self, task, agents):
        rewards = dict.fromkeys(agents, 0.0)
        with agents.together() as block:
            for name, agent in agents.items():
                plays = (_plays, task) if name == self.speaker else (lambda _: 0.0,)
                parts = [block.run(*plays, agent), block.run(*plays, agent.begin())]
                if name == self.speaker:
                    speaker = parts
        rewards[self.speaker] = speaker[0].result + speaker[1].result
        return rewards
