"""Figures of several rounds: medians with their spread, ratios that are paired by round, and bootstrap intervals. Pure."""

import random
from collections.abc import Sequence
from statistics import median

_SAMPLES = 2000


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median, with the least and the largest of several values."""
    middle = format(median(values), form)
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"


def ratios(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [value / base for value, base in zip(values, bases, strict=True)]


def bootstrap(
    values: Sequence[Sequence[float]], bases: Sequence[Sequence[float]], seed: int = 0
) -> tuple[float, float]:
    """Return the 90 % interval of the ratio of two medians: of the values and of the bases of all rounds.

    Rounds are drawn with replacement, both sides of a round together, and then values within each side of a round.
    """
    draw = random.Random(seed)
    found = []
    for _ in range(_SAMPLES):
        rounds = draw.choices(range(len(values)), k=len(values))
        sides = [
            median(value for number in rounds for value in draw.choices(side[number], k=len(side[number])))
            for side in (values, bases)
        ]
        found.append(sides[0] / sides[1])
    found.sort()
    return found[round(0.05 * (_SAMPLES - 1))], found[round(0.95 * (_SAMPLES - 1))]
