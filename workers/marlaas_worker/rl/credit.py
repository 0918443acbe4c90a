"""Advantages of single turns, from rewards that the environment gives to turns. Pure Python, as `advantages`.

A trajectory's turns k = 0, 1, ... have rewards r_k; what the episode earns beside them is part of the last one. The return of a turn is

    G_k = sum over j >= k of discount^(j - k) r_j

`turn` compares a return with those of the group's other trajectories at the same k, a baseline that depends on time only (returns-to-go).
`state` adds to the episode's advantage that of the turn among the group's turns in the same state (GiGPO: arXiv 2505.10978, section 4.2).
"""

import math
from collections.abc import Hashable, Sequence

from marlaas_worker.rl.advantages import Estimator, advantages, has_signal

_FEWEST = 2
"""Returns that a comparison needs."""


def turn_returns(rewards: Sequence[float], total: float, discount: float) -> list[float]:
    """Return the discounted returns G [K] of a trajectory's turns; the last turn earns what `total` exceeds the sum of `rewards` by.

    Args:
        rewards: of its turns [K].
        total: the trajectory's reward, of which they are part.
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
    """Return the advantage of each turn of each trajectory, from their returns: the comparison is among turns of the same number.

    Turns beyond the last number that two trajectories have are compared together with that number. If one trajectory alone has
    turns, or none has, all advantages are 0.
    """
    return _compared(estimator, group, _levels(group))


def by_state(
    estimator: Estimator, group: Sequence[Sequence[float]], states: Sequence[Sequence[Hashable]]
) -> list[list[float]]:
    """Return the advantage of each turn among the group's turns in the same state; 0 for a state that occurs once.

    Args:
        group: the returns of each trajectory's turns.
        states: their states, in the same form.
    """
    return _compared(estimator, group, states)


def has_turn_signal(group: Sequence[Sequence[float]], *, by_state: bool) -> bool:
    """Return whether the returns [trajectory][turn] of a group give any turn an advantage.

    by_state: whether they may, since the states are not known here.
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
