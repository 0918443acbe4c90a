"""`calculator` with seeded waiting times of its tool; the environment of `bench multitenant`.

It uses only what the commit before has too, and is found on PYTHONPATH.
"""

import math
import random
import time

from marlaas.environment import Agent, Message, Score, Task
from marlaas.envs.extraction import last_number
from marlaas.models.curriculum import TOOL_ERROR, calculator_task, requested_expression, tool_reply
from marlaas_api.names import derive_seed


def calculator(task: Task, agent: Agent, median_s: float = 0.0, sigma: float = 0.0) -> Score:
    """Play one episode. Each call of the tool waits for a log-normal time, drawn from the task and the expression."""
    puzzle = calculator_task(task.split, derive_seed(task.seed, task.index))
    reply, num_computed = agent.say(puzzle.prompt), 0
    while (expression := requested_expression(reply.text)) is not None:
        with agent.tool():
            time.sleep(wait_s(task, expression, median_s, sigma))
            result = tool_reply(expression)
        num_computed += result != TOOL_ERROR
        reply = agent.ask(Message("tool", result))
    return Score(float(num_computed > 0 and last_number(reply.text) == puzzle.answer))


def wait_s(task: Task, expression: str, median_s: float, sigma: float) -> float:
    """Return the waiting time of one call, the same in every mode if the policy says the same."""
    drawn = random.Random(derive_seed(task.seed, task.index, expression)).gauss(0.0, sigma)
    return median_s * math.exp(drawn)
