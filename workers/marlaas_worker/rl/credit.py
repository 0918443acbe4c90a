"""Advantages of single turns, from rewards that the environment gives to turns. Pure Python, as `advantages`.

A trajectory's turns k = 0, 1, ... have rewards r_k. The part of the trajectory's reward that belongs to no turn is added to the last turn's. The
return of a turn is

    G_k = sum over j >= k of discount^(j - k) r_j

`credit.type: turn` compares a return with those of the group's other trajectories at the same k, a baseline that depends on time only
(returns-to-go). `credit.type: state` adds to the episode's advantage the turn's advantage among the group's turns in the same state (GiGPO: arXiv
2505.10978, section 4.2).
"""

import math
from collections.abc import Hashable, Sequence

from marlaas_worker.rl.advantages import Estimator, advantages, has_signal

_FEWEST = 2
"""Fewest returns that can be compared."""


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
