"""Rewards as a weighted sum of small, separately logged functions, and the most common of these functions.

    answer = extractor("boxed")

    def correct(reply, truth):
        return float(answer(reply.message) == truth)

    RUBRIC = Rubric((1.0, correct), (0.1, format_reward(r"<think>.*</think>.*")), (0.5, length_penalty(200, 300)))

    def play(task, agent):
        ...
        return RUBRIC.score(reply=reply, truth=truth)

The parameters of a part select its arguments, by name, from the keyword arguments of `score`. A part does not
depend on weights or on other parts. Imports the standard library and the environment SDK only.
"""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from marlaas.environment import Reply, Score
from marlaas.envs.extraction import Extract, extractor
from marlaas.envs.loading import nearest
from marlaas.scores import number
from marlaas_api.errors import InvalidInput

__all__ = [
    "Extract",
    "Part",
    "Rubric",
    "answer_reward",
    "cosine_length",
    "extractor",
    "format_reward",
    "length_penalty",
    "shorter",
]

Part = Callable[..., float | Score]


@dataclass(frozen=True, slots=True)
class _Weighted:
    weight: float
    name: str
    part: Part
    wants: tuple[str, ...]


class Rubric:
    """Weighted sum of reward parts, given as `(weight, function)`. A part of weight 0 is only logged.

    Raises:
        InvalidInput: two parts have the same name, a part has no name (a lambda; the name is the metric's), or a
            weight is not a finite number.
    """

    def __init__(self, *parts: tuple[float, Part]) -> None:
        self._parts = [_weighted(weight, part) for weight, part in parts]
        names = [part.name for part in self._parts]
        if not names:
            raise InvalidInput("a rubric needs at least one part, (weight, function)")
        if doubled := [name for name in names if names.count(name) > 1]:
            raise InvalidInput(
                f"a rubric has two parts named {doubled[0]!r}: rename one, because the names are metrics"
            )

    def score(self, **things: Any) -> Score:
        """Return the weighted reward, with each part's unweighted value as a metric.

        A part may return a `Score`: its metrics are added.

        Raises:
            InvalidInput: a part needs an argument that is missing, or returns no finite number. This is a fault of
                the environment.
        """
        values: dict[str, float] = {}
        added: dict[str, float | None] = {}
        for part in self._parts:
            returned = _returned(part, things)
            if isinstance(returned, Score):
                added |= returned.metrics
                returned = returned.reward
            values[part.name] = number(returned, f"the value of the rubric's part {part.name!r}")
        return Score(sum(part.weight * values[part.name] for part in self._parts), {**added, **values})


def format_reward(pattern: str) -> Part:
    r"""Return a part `format`: 1 if the message, stripped of white space, matches `pattern` as a whole (`.` matches any character).

    The message is the reply after its opening, so that a chat template may open `<think>` in the prompt.
    """
    try:
        form = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise InvalidInput(f"pattern {pattern!r} is not a regular expression: {error}") from error

    def format(reply: Reply) -> float:
        return float(form.fullmatch(reply.message.strip()) is not None)

    return format


def length_penalty(free_tokens: int, max_tokens: int) -> Part:
    """Return a part `length`: 0 up to `free_tokens` tokens, then linear down to -1 at `max_tokens` and beyond.

    Source: DAPO (arXiv 2503.14476), equation 13, soft overlong punishment, with L_max = max_tokens, L_cache =
    max_tokens - free_tokens.
    """
    if not 0 <= free_tokens < max_tokens:
        raise InvalidInput(f"length_penalty({free_tokens}, {max_tokens}): expected 0 <= free_tokens < max_tokens")

    def length(reply: Reply) -> float:
        return max(-1.0, min(0.0, (free_tokens - reply.num_tokens) / (max_tokens - free_tokens)))

    return length


def cosine_length(num_tokens: int, max_tokens: int, bounds: tuple[float, float], exceeded: float = -10.0) -> float:
    """Return the cosine reward of a reply's length: b + (a - b) (1 + cos(pi num_tokens / max_tokens)) / 2, from a at 0 tokens to b.

    With the bounds of the paper, 2 and 1 for a right reply and -10 and 0 for a wrong one, a short right reply earns more than a long one, and a
    short wrong reply less. Source: Demystifying Long Chain-of-Thought Reasoning (arXiv 2502.03373), section 4.2.

    Args:
        bounds: (a, b).
        exceeded: of a reply of max_tokens tokens or more, right or wrong.
    """
    if num_tokens >= max_tokens:
        return exceeded
    begin, end = bounds
    return end + 0.5 * (begin - end) * (1.0 + math.cos(math.pi * num_tokens / max_tokens))


def shorter(num_tokens: Sequence[int], is_right: Sequence[bool]) -> list[float]:
    """Return the length reward of each reply of a group: 0.5 for the shortest, -0.5 for the longest; a wrong reply earns at most 0.

    All are 0 if the replies are of one length. Source: Kimi k1.5 (arXiv 2501.12599), section 2.3.3.
    """
    low, high = min(num_tokens, default=0), max(num_tokens, default=0)
    if low == high:
        return [0.0] * len(num_tokens)
    values = [0.5 - (length - low) / (high - low) for length in num_tokens]
    return [value if right else min(0.0, value) for value, right in zip(values, is_right, strict=True)]


def answer_reward(kind: str, pattern: str | None = None) -> Part:
    """Return a part `correct`: 1 if the reply's answer equals `truth`.

    Two numbers are compared by value. `kind` and `pattern` are those of `extractor`. Answers with a mark of their own (all kinds but
    `whole` and `last_number`) may begin in the reply's opening.
    """
    extract, is_marked = extractor(kind, pattern), kind not in ("whole", "last_number")

    def correct(reply: Reply, truth: object) -> float:
        answer = extract(reply.message if is_marked else reply.text)
        return float(answer is not None and (answer == str(truth) or _same_number(answer, str(truth))))

    return correct


def _same_number(one: str, other: str) -> bool:
    try:
        return math.isclose(float(one.replace(",", "")), float(other.replace(",", "")), rel_tol=1e-9)
    except ValueError:
        return False


def _weighted(weight: float, part: Part) -> _Weighted:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise InvalidInput(
            f"a rubric's part is (weight, function), and a weight is a finite number, not {weight!r:.80}"
        )
    name = getattr(part, "__name__", type(part).__name__)
    if not callable(part) or not name.isidentifier():
        raise InvalidInput(f"a rubric's part is (weight, function), and the function needs a name, not {part!r:.80}")
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(part).parameters.values()
    return _Weighted(float(weight), name, part, tuple(p.name for p in parameters if p.kind in kinds))


def _returned(part: _Weighted, things: dict[str, Any]) -> object:
    parameters = inspect.signature(part.part).parameters
    for name in part.wants:
        if name not in things and parameters[name].default is inspect.Parameter.empty:
            hint = nearest(name, things)
            raise InvalidInput(
                f"the rubric's part {part.name!r} needs {name!r}, which is missing{hint}; given are {', '.join(things)}"
            )
    return part.part(**{name: things[name] for name in part.wants if name in things})
