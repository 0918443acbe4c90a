"""Tasks that the builtin model `tiny` was pretrained on: their text formats and generators.

Environments draw their tasks from here as well, so jobs train on tasks that the model was pretrained for. All
functions are pure (standard library only): split and seed determine a task.

Invariant: a held-out task is never a training task, whatever the seeds; a hash of the text determines the split.

| task | user | assistant | tool | assistant |
|---|---|---|---|---|
| reverse | `reverse: abcd` | `dcba` | | |
| calculator | `12+34=?` | `calc: 12+34` | `46` (`error` if it is no expression) | `46` |
"""

import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from marlaas_api.names import Split, split_of

MIN_LETTERS = 3
MAX_LETTERS = 5
MAX_OPERAND = 99
OPERATORS = "+-*"
TOOL_ERROR = "error"
_EXPRESSION = re.compile(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*")
_CALL = re.compile(r"^calc:[ \t]*(.*?)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ReverseTask:
    """Spell a word backwards, in one turn."""

    word: str

    @property
    def prompt(self) -> str:
        """The user's message."""
        return f"reverse: {self.word}"

    @property
    def answer(self) -> str:
        """The right reply."""
        return self.word[::-1]


@dataclass(frozen=True, slots=True)
class CalculatorTask:
    """Let the tool compute an expression, then reply with its result, in two turns."""

    expression: str

    @property
    def prompt(self) -> str:
        """The user's message."""
        return f"{self.expression}=?"

    @property
    def call(self) -> str:
        """The right first reply."""
        return f"calc: {self.expression}"

    @property
    def answer(self) -> str:
        """The tool's message after the right call, which is also the right last reply."""
        return tool_reply(self.expression)


class _Task(Protocol):
    @property
    def prompt(self) -> str: ...


_T = TypeVar("_T", bound=_Task)


def reverse_task(split: Split, seed: int) -> ReverseTask:
    """Return the task of this seed: 3 to 5 distinct letters."""
    return _draw(split, seed, lambda rng: ReverseTask("".join(rng.sample(string.ascii_lowercase, _num_letters(rng)))))


def calculator_task(split: Split, seed: int) -> CalculatorTask:
    """Return the task of this seed: a sum, difference or product of two numbers from 1 to 99."""
    return _draw(split, seed, lambda rng: CalculatorTask(_expression(rng)))


def requested_expression(reply: str) -> str | None:
    """Return the expression of a calculator call in the reply; None if there is no call."""
    match = _CALL.search(reply)
    return match[1] if match else None


def evaluate(expression: str) -> int | None:
    """Return the value of `a+b`, `a-b` or `a*b` (integers, spaces allowed); None for anything else."""
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return None
    left, operator, right = int(match[1]), match[2], int(match[3])
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def tool_reply(expression: str) -> str:
    """Return the calculator's message: the value in decimal, or `error`."""
    value = evaluate(expression)
    return TOOL_ERROR if value is None else str(value)


def _draw(split: Split, seed: int, candidate: Callable[[random.Random], _T]) -> _T:
    rng = random.Random(seed)
    while True:
        task = candidate(rng)
        if split_of(task.prompt) == split:
            return task


def _num_letters(rng: random.Random) -> int:
    return rng.randint(MIN_LETTERS, MAX_LETTERS)


def _expression(rng: random.Random) -> str:
    return f"{rng.randint(1, MAX_OPERAND)}{rng.choice(OPERATORS)}{rng.randint(1, MAX_OPERAND)}"
