"""Training conversations of `tiny`: the curriculum's tasks, with deliberate mistakes at fixed rates.

A model trained on them samples the same mistakes at the same rates at temperature 1, on any machine. Its greedy
reply stays right. Reinforcement learning can improve the sampled replies.
"""

import random
import string
from dataclasses import dataclass

from marlaas.models.curriculum import (
    OPERATORS,
    CalculatorTask,
    ReverseTask,
    calculator_task,
    requested_expression,
    reverse_task,
    tool_reply,
)
from marlaas.models.tokenizer import TemplateMessage
from marlaas_api.names import Split


@dataclass(frozen=True, slots=True)
class Mistakes:
    """Probability of each kind of mistake.

    Attributes:
        letter: a letter of the reversed word is replaced by a random one (per letter).
        untooled: the reply is a guess instead of a call.
        call: one character of the expression is miscopied or lost.
        result: one digit of the tool's result is miscopied.
    """

    letter: float
    untooled: float
    call: float
    result: float


NO_MISTAKES = Mistakes(0, 0, 0, 0)


def reverse_demonstration(seed: int, mistakes: Mistakes) -> list[TemplateMessage]:
    """Return one conversation about the training task of this seed. mistakes: probabilities of the assistant's mistakes."""
    rng, task = random.Random(f"reverse {seed}"), reverse_task(Split.TRAIN, seed)
    return [TemplateMessage("user", task.prompt), TemplateMessage("assistant", _reversal(task, rng, mistakes))]


def calculator_demonstration(seed: int, mistakes: Mistakes) -> list[TemplateMessage]:
    """Return one conversation about the training task of this seed. After an `error` of the tool, the assistant calls it again."""
    rng, task = random.Random(f"calculator {seed}"), calculator_task(Split.TRAIN, seed)
    first = _first_reply(task, rng, mistakes)
    conversation = [TemplateMessage("user", task.prompt), TemplateMessage("assistant", first)]
    expression = requested_expression(first)
    if expression is None:
        return conversation
    answer = tool_reply(expression)
    if not answer.lstrip("-").isdigit():
        conversation += [TemplateMessage("tool", answer), TemplateMessage("assistant", task.call)]
        answer = task.answer
    last = _with_another_digit(answer, rng) if rng.random() < mistakes.result else answer
    return [*conversation, TemplateMessage("tool", answer), TemplateMessage("assistant", last)]


def _reversal(task: ReverseTask, rng: random.Random, mistakes: Mistakes) -> str:
    return "".join(
        rng.choice(string.ascii_lowercase) if rng.random() < mistakes.letter else letter for letter in task.answer
    )


def _first_reply(task: CalculatorTask, rng: random.Random, mistakes: Mistakes) -> str:
    if rng.random() < mistakes.untooled:
        return _with_another_digit(task.answer, rng)
    if rng.random() < mistakes.call:
        return f"calc: {_miscopied(task.expression, rng)}"
    return task.call


def _miscopied(expression: str, rng: random.Random) -> str:
    at = rng.randrange(len(expression))
    kind = OPERATORS if expression[at] in OPERATORS else string.digits
    return expression[:at] + rng.choice(("", rng.choice(kind))) + expression[at + 1 :]


def _with_another_digit(number: str, rng: random.Random) -> str:
    at = rng.choice([index for index, character in enumerate(number) if character.isdigit()])
    return number[:at] + rng.choice(string.digits) + number[at + 1 :]
