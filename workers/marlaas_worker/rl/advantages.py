"""Group-relative advantages, in plain Python: the orchestrator asks `has_signal` and must not import torch.

Knows nothing of tokens: an advantage belongs to a whole trajectory and weighs each of its generated tokens alike.
"""

import math
from collections.abc import Sequence
from typing import Literal

Algorithm = Literal["grpo", "reinforce"]

EPSILON = 1e-6
"""Keeps grpo's denominator from zero; a spread of rewards no larger than this counts as none."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ, so that its advantages are not all zero.

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    _check(rewards)
    return max(rewards) - min(rewards) > EPSILON


def advantages(algorithm: Algorithm, rewards: Sequence[float]) -> list[float]:
    """Advantages [G] of a group's rewards [G]; they sum to zero.

    grpo: (r - mean) / (deviation + EPSILON), the deviation over the group itself, not an estimate for a larger one (DeepSeekMath,
    arXiv 2402.03300, section 4.1.2). reinforce: r minus the mean of the *other* rewards, so that a baseline never sees what it is
    subtracted from (RLOO, arXiv 2402.14740).

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    _check(rewards)
    return _grpo(rewards) if algorithm == "grpo" else _leave_one_out(rewards)


def _grpo(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    return [(reward - mean) / (deviation + EPSILON) for reward in rewards]


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def _check(rewards: Sequence[float]) -> None:
    if len(rewards) < 2:
        raise ValueError(f"a group needs at least two rewards to compare, found {len(rewards)}")
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, found {list(rewards)}")
