"""`relay`: a task that two agents solve together; neither can solve it alone."""

import time

from marlaas.environment import Agents, Message, Score, Task
from marlaas.envs.extraction import last_number
from marlaas.envs.tiny_tasks import Calculator
from marlaas.models.curriculum import TOOL_ERROR, requested_expression, tool_reply


class Relay(Calculator):
    """The calculator's task split in two: `caller` calls the tool, `reader` answers from its result. Both get the team's reward.

    The reward is 1 if the tool computed something and the last number of the reader's reply is right, else 0. A caller that
    makes no call ends the episode, so its reader is not called.

    Args:
        max_operand: largest number in an expression, 9 to 99.
        operators: which of + - * occur.
        tool_latency_s: seconds that the tool takes.
    """

    agents = ("caller", "reader")

    def play(self, task: Task, agents: Agents) -> Score:  # type: ignore[override]  # a different number of agents
        """Play one episode of at most one turn of each agent."""
        puzzle = self._puzzle(task)
        call = agents.caller.say(puzzle.prompt)
        expression = requested_expression(call.text)
        if expression is None:
            return Score(0.0, {"called": 0.0, "computed": 0.0})
        with agents.caller.tool():
            time.sleep(self._latency_s)
            result = tool_reply(expression)
        computed = float(result != TOOL_ERROR)
        heard = (Message("user", puzzle.prompt), Message("assistant", puzzle.call), Message("tool", result))
        answer = agents.reader.ask(heard)
        right = float(computed > 0 and last_number(answer.text) == puzzle.answer)
        return Score(right, {"called": 1.0, "computed": computed})
