"""From rewards to advantages, in plain Python: the orchestrator asks `has_signal` and must not import torch.

Knows nothing of tokens: an advantage belongs to a whole trajectory and weighs each of its generated tokens alike. Nor does it know what the rewards
that it compares have in common; `algorithms` says whether they are those of a group or of a step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Estimator = Literal["standardised", "centred", "leave-one-out"]

EPSILON = 1e-6
"""Keeps a deviation from being divided by when it is zero; a spread of rewards no larger than this counts as none."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ, so that its advantages are not all zero.

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    _check(rewards)
    return max(rewards) - min(rewards) > EPSILON


def advantages(estimator: Estimator, rewards: Sequence[float]) -> list[float]:
    """Advantages [N] of rewards [N]; they sum to zero.

    standardised: (r - mean) / (deviation + EPSILON), the deviation over these rewards themselves, not an estimate for more of them (DeepSeekMath,
    arXiv 2402.03300, section 4.1.2). centred: r - mean, because the deviation makes a question that is nearly always or nearly never answered weigh
    more (Dr. GRPO, arXiv 2503.20783, section 3.1). leave-one-out: r minus the mean of the *other* rewards, so that a baseline never sees what it is
    subtracted from (RLOO, arXiv 2402.14740, section 2.3); that is N / (N - 1) times centred.

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    _check(rewards)
    return _ESTIMATORS[estimator](rewards)


def overlong_penalty(num_tokens: int, max_tokens: int, last: int) -> float:
    """What a reply of `num_tokens` gets on top of its reward: 0 until `max_tokens - last`, then falling linearly to -1 at `max_tokens`.

    DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4, equation 13). last: 0 punishes nothing.
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
