"""From rewards to advantages, in plain Python: the orchestrator calls `has_signal` and must not import torch.

An advantage belongs to a whole trajectory and applies equally to each of its generated tokens, unless the job credits
single turns. `algorithms` determines whether the rewards compared are those of a group or of a step.

Credit of turns: a trajectory's turns k = 0, 1, ... have rewards r_k. The part of the trajectory's reward that belongs to no turn is added
to the last turn's. The return of a turn is

    G_k = sum over j >= k of discount^(j - k) r_j

`credit.type: turn` compares a return with those of the group's other trajectories at the same k, a baseline that depends on time only
(returns-to-go). `credit.type: state` adds to the episode's advantage the turn's advantage among the group's turns in the same state (GiGPO: arXiv
2505.10978, section 4.2).
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal

Estimator = Literal["standardised", "centred", "leave-one-out", "none"]

EPSILON = 1e-6
"""Added to a standard deviation, which may be zero, before dividing by it. Rewards that differ by at most this value have no signal."""
_FEWEST = 2
"""Fewest rewards or returns that can be compared."""


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
    if len(rewards) < _FEWEST:
        raise ValueError(f"at least two rewards are needed to compare, found {len(rewards)}")
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, found {list(rewards)}")


def turn_returns(rewards: Sequence[float], total: float, discount: float) -> list[float]:
    """Return the discounted returns G [K] of a trajectory's turns.

    Args:
        rewards: rewards of the turns [K].
        total: the trajectory's reward. Its part beyond the sum of `rewards` is added to the last turn's reward.
        discount: factor for each turn between a turn and a later reward.
    """
    if not rewards:
        return []
    found: list[float] = []
    later, end = 0.0, total - math.fsum(rewards)
    for reward in (rewards[-1] + end, *rewards[-2::-1]):
        later = reward + discount * later
        found.append(later)
    return found[::-1]


def by_turn(estimator: Estimator, group: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the advantage of each turn among the group's turns of the same number, [trajectory][turn].

    Turns later than the last one of the second-longest trajectory are compared as if they had the number of that turn. If only one
    trajectory has turns, they are compared with nothing. A turn that is compared with no other has the advantage 0.

    Args:
        group: the returns of each trajectory's turns.
    """
    return _compared(estimator, group, _levels(group))


def by_state(
    estimator: Estimator, group: Sequence[Sequence[float]], states: Sequence[Sequence[Hashable]]
) -> list[list[float]]:
    """Return the advantage of each turn among the group's turns in the same state, [trajectory][turn]; 0 for a state that occurs once.

    Args:
        group: the returns of each trajectory's turns.
        states: the state of each turn, in the same form; equal values are one state.
    """
    return _compared(estimator, group, states)


def has_turn_signal(group: Sequence[Sequence[float]], *, by_state: bool) -> bool:
    """Return whether the returns [trajectory][turn] of a group can give any turn an advantage other than 0.

    by_state: True compares turns in the same state, False turns of the same number. The states are not known here: with `by_state` the
    result is whether two turns of the group have different returns, so that an advantage is possible.
    """
    classes: dict[int, list[float]] = {}
    for member, own in zip(group, _levels(group), strict=True):
        for value, level in zip(member, own, strict=True):
            classes.setdefault(0 if by_state else level, []).append(value)
    return any(len(together) >= _FEWEST and has_signal(together) for together in classes.values())


def _levels(group: Sequence[Sequence[float]]) -> list[list[int]]:
    lengths = sorted(filter(None, map(len, group)), reverse=True)
    last = lengths[1] - 1 if len(lengths) >= _FEWEST else math.inf
    return [[int(min(at, last)) for at in range(len(member))] for member in group]


def _compared(
    estimator: Estimator, group: Sequence[Sequence[float]], classes: Sequence[Sequence[Hashable]]
) -> list[list[float]]:
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for member, own in enumerate(classes):
        for at, name in enumerate(own):
            places.setdefault(name, []).append((member, at))
    found = [[0.0] * len(member) for member in group]
    for together in places.values():
        if len(together) >= _FEWEST:
            values = advantages(estimator, [group[member][at] for member, at in together])
            for (member, at), value in zip(together, values, strict=True):
                found[member][at] = value
    return found
