"""`reverse` and `calculator`: the tasks of the builtin model `tiny`, in one turn, and with a tool in two or more turns."""

import re
import time

from marlaas.environment import Agent, Message, Score, Task
from marlaas.envs.extraction import last_number
from marlaas.models.curriculum import (
    MAX_LETTERS,
    MAX_OPERAND,
    MIN_LETTERS,
    OPERATORS,
    TOOL_ERROR,
    CalculatorTask,
    ReverseTask,
    calculator_task,
    requested_expression,
    reverse_task,
    tool_reply,
)
from marlaas_api.errors import InvalidInput
from marlaas_api.names import derive_seed


class Reverse:
    """Spell a word backwards: `reverse: abcd` wants `dcba`.

    Args:
        min_length: letters of the shortest word, 3 to 5.
        max_length: letters of the longest word, 3 to 5.
        partial: give the share of right letters instead of 1 or 0.
    """

    def __init__(self, min_length: int = MIN_LETTERS, max_length: int = MAX_LETTERS, partial: bool = False) -> None:
        if not MIN_LETTERS <= min_length <= max_length <= MAX_LETTERS:
            raise InvalidInput(
                f"reverse: {min_length} to {max_length} letters; words have {MIN_LETTERS} to {MAX_LETTERS} letters"
            )
        self._lengths = range(min_length, max_length + 1)
        self._partial = partial

    def play(self, task: Task, agent: Agent) -> Score:
        """Play one episode of one turn."""
        puzzle = self._puzzle(task)
        reply = agent.say(puzzle.prompt).text.strip()
        exact = float(reply == puzzle.answer)
        return Score(_share(reply, puzzle.answer) if self._partial else exact, {"exact": exact})

    def _puzzle(self, task: Task) -> ReverseTask:
        seed = derive_seed(task.seed, task.index)
        while True:
            puzzle = reverse_task(task.split, seed)
            if len(puzzle.word) in self._lengths:
                return puzzle
            seed += 1


def _share(reply: str, answer: str) -> float:
    right = sum(a == b for a, b in zip(reply, answer, strict=False))
    return right / max(len(reply), len(answer))


_MIN_OPERAND = 9


class Calculator:
    """Compute with a tool: `12+34=?` wants `calc: 12+34`, then the number.

    The reward is 1 if the tool computed something and the last number of the last reply is right, else 0.

    Args:
        max_operand: largest number in an expression, 9 to 99.
        operators: which of + - * occur.
        tool_latency_s: seconds that each call of the tool takes.
    """

    def __init__(self, max_operand: int = MAX_OPERAND, operators: str = OPERATORS, tool_latency_s: float = 0.0) -> None:
        if not _MIN_OPERAND <= max_operand <= MAX_OPERAND:
            raise InvalidInput(f"calculator: max_operand is {max_operand}; expected {_MIN_OPERAND} to {MAX_OPERAND}")
        if not operators or set(operators) - set(OPERATORS):
            raise InvalidInput(f"calculator: operators is {operators!r}; expected some of {OPERATORS}")
        if tool_latency_s < 0:
            raise InvalidInput(f"calculator: tool_latency_s is {tool_latency_s}; expected 0 or more seconds")
        self._max_operand = max_operand
        self._operators = frozenset(operators)
        self._latency_s = tool_latency_s

    def play(self, task: Task, agent: Agent) -> Score:
        """Run the policy's tool calls until a reply makes none."""
        puzzle = self._puzzle(task)
        reply, num_calls, num_computed = agent.say(puzzle.prompt), 0, 0
        while (expression := requested_expression(reply.text)) is not None:
            with agent.tool():
                time.sleep(self._latency_s)
                result = tool_reply(expression)
            num_calls += 1
            num_computed += result != TOOL_ERROR
            reply = agent.ask(Message("tool", result))
        right = float(num_computed > 0 and last_number(reply.text) == puzzle.answer)
        return Score(right, {"tool_calls": num_calls, "tool_used": float(num_computed > 0)})

    def _puzzle(self, task: Task) -> CalculatorTask:
        seed = derive_seed(task.seed, task.index)
        while True:
            puzzle = calculator_task(task.split, seed)
            if self._allows(puzzle.expression):
                return puzzle
            seed += 1

    def _allows(self, expression: str) -> bool:
        operands = [int(digits) for digits in re.findall(r"\d+", expression)]
        return max(operands) <= self._max_operand and not self._operators.isdisjoint(expression)
