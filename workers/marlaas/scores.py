"""Rewards and metrics that an environment gives: which values are accepted, wherever they are given.

The same checks apply when a reward is set on an agent, set on a candidate, or returned by `play`.
"""

import json
import math
from collections.abc import Mapping

from marlaas_api.errors import InvalidInput

MAX_DATA = 64 << 10
"""Most characters of an episode's data for the comparison with its group, as JSON."""
MAX_METRICS = 128
MAX_METRIC_NAME = 64
MAX_NUMBER = 1e30
"""Largest absolute value of a reward or a metric, so that their squares and sums stay finite."""


class InvalidScore(InvalidInput):
    """A reward or a metric is not valid. It is a fault of the environment, also within a tool call of the policy."""


def number(value: object, what: str) -> float:
    """Return a number as a float; scalars of numpy and torch, and bools, are numbers too.

    Args:
        what: names the value in the error.

    Raises:
        InvalidScore: not a number, not finite, or larger than MAX_NUMBER.
    """
    try:
        found = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer too large for a float
        found = math.inf
    except (TypeError, ValueError, RuntimeError):  # torch raises RuntimeError for a tensor of several numbers
        raise InvalidScore(f"{what} is {value!r:.80}; expected a number") from None
    if isinstance(value, str) or not abs(found) <= MAX_NUMBER:
        raise InvalidScore(f"{what} is {value!r:.80}; expected a finite number from {-MAX_NUMBER:g} to {MAX_NUMBER:g}")
    return found


def data_text(data: object) -> str:
    """Return data for the comparison of a group as JSON text. Raises InvalidScore: it is no JSON, or longer than MAX_DATA."""
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidScore(f"Score.data is {data!r:.80}; expected values of JSON: {error}") from None
    if len(text) > MAX_DATA:
        raise InvalidScore(f"Score.data has {len(text)} characters as JSON; expected at most {MAX_DATA}")
    return text


def metrics(given: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics of an episode. One that is None or NaN does not apply to the episode, and is left out.

    Raises:
        InvalidScore: too many metrics, a name that cannot be printed, or another value that is not a finite number.
    """
    if len(given) > MAX_METRICS:
        raise InvalidScore(f"{len(given)} metrics; an episode has at most {MAX_METRICS}")
    for name in given:
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_METRIC_NAME or not name.isprintable():
            raise InvalidScore(f"a metric's name is 1 to {MAX_METRIC_NAME} printable characters, not {name!r:.80}")
    return {name: number(value, f"metric {name!r}") for name, value in given.items() if not _is_missing(value)}


def _is_missing(value: object) -> bool:
    """Whether a metric is None or NaN; NaN is the value that differs from itself."""
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError, RuntimeError):  # an array, which `number` refuses
        return False
