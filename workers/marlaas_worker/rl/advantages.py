"""From rewards to advantages, in plain Python: the orchestrator calls `has_signal` and must not import torch.

An advantage belongs to a whole trajectory and applies equally to each of its generated tokens, unless the job credits
single turns (`credit`). `algorithms` determines whether the rewards compared are those of a group or of a step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Estimator = Literal["standardised", "centred", "leave-one-out", "none"]

EPSILON = 1e-6
"""Added to a standard deviation, which may be zero, before dividing by it. Rewards that differ by at most this value have no signal."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ by more than EPSILON, so that its advantages are not all zero.

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    _check(rewards)
    return max(rewards) - min(rewards) > EPSILON


def advantages(estimator: Estimator, rewards: Sequence[float]) -> list[float]:
    """Return advantages [N] of rewards [N]; they sum to zero, except for `none`.

    standardised: (r - mean) / (deviation + EPSILON), with the population deviation of these rewards
    (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
    centred: r - mean. Dividing by the deviation would give more weight to tasks that nearly always or nearly
    never succeed (Dr. GRPO, arXiv 2503.20783, section 3.1).
    leave-one-out: r minus the mean of the *other* rewards, so that the baseline is independent of r (RLOO,
    arXiv 2402.14740, section 2.3); equal to N / (N - 1) times centred.
    none: 1 each; rewards are not compared.

    Raises:
        ValueError: fewer than two rewards, except for `none`, or one that is not finite.
    """
    if estimator == "none":
        return [1.0] * len(rewards)
    _check(rewards)
    return _ESTIMATORS[estimator](rewards)


def overlong_penalty(num_tokens: int, max_tokens: int, last: int) -> float:
    """Return DAPO's soft overlong punishment of a reply, from -1 to 0, to be added to its reward (arXiv 2503.14476, section 3.4, equation 13).

    The penalty is 0 up to `max_tokens - last` tokens, then falls linearly to -1 at `max_tokens`.

    Args:
        num_tokens: generated tokens of the reply.
        max_tokens: most tokens that a reply may have.
        last: number of tokens over which the penalty falls; 0 disables it.
    """
    over = num_tokens - (max_tokens - last)
    return -min(1.0, over / last) if last > 0 and over > 0 else 0.0


def _standardised(rewards: Sequence[float]) -> list[float]:
    centred = _centred(rewards)
    deviation = math.sqrt(math.fsum(value**2 for value in centred) / len(rewards))
    return [value / (deviation + EPSILON) for value in centred]


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


_ESTIMATORS: Mapping[Estimator, Callable[[Sequence[float]], list[float]]] = {
    "standardised": _standardised,
    "centred": _centred,
    "leave-one-out": _leave_one_out,
}


def _check(rewards: Sequence[float]) -> None:
    if len(rewards) < 2:
        raise ValueError(f"at least two rewards are needed to compare, found {len(rewards)}")
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, found {list(rewards)}")
