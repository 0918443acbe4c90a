"""Environments whose tools wait for log-normal times, for `bench staleness --runs` and `--halves`; found on PYTHONPATH.

The times are drawn anew in every episode: they are the tools', not the task's.
"""

import random
import time

from marlaas.environment import Agent, Message, Score, Task
from marlaas.envs.extraction import last_number
from marlaas.models.curriculum import calculator_task, requested_expression, reverse_task, tool_reply
from marlaas_api.names import derive_seed

_CHANCE = random.SystemRandom()


def chat(task: Task, agent: Agent, calls: int, median_s: float, sigma: float = 1.0) -> Score:
    """Spell words backwards, and call a tool that waits after each. The reward is the share of right words."""
    num_right = 0
    for number in range(calls):
        word = reverse_task(task.split, derive_seed(task.seed, task.index, number))
        num_right += agent.ask(Message("user", word.prompt)).text.strip() == word.answer
        with agent.tool():
            _wait(median_s, sigma)
    return Score(num_right / calls)


def halves(task: Task, agent: Agent, median_s: float, sigma: float = 1.0) -> Score:
    """Spell a word backwards at once, or, in every second task, answer with the help of a calculator that waits."""
    seed = derive_seed(task.seed, task.index)
    if task.index % 2 == 0:
        word = reverse_task(task.split, seed)
        reward = float(agent.say(word.prompt).text.strip() == word.answer)
        return Score(reward, {"short": reward})
    puzzle, num_calls = calculator_task(task.split, seed), 0
    reply = agent.say(puzzle.prompt)
    while (expression := requested_expression(reply.text)) is not None:
        num_calls += 1
        with agent.tool():
            _wait(median_s, sigma)
        reply = agent.ask(Message("tool", tool_reply(expression)))
    if num_calls == 0:
        _wait(median_s, sigma)  # an answer without a tool takes as long to check
    reward = float(num_calls > 0 and last_number(reply.text) == puzzle.answer)
    return Score(reward, {"long": reward})


def _wait(median_s: float, sigma: float) -> None:
    time.sleep(median_s * _CHANCE.lognormvariate(0.0, sigma))
