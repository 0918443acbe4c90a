"""Kuhn poker, exactly: value and NashConv of two policies, and the reach-weighted average of a player's versions.

A policy maps information sets (`envs.kuhn_poker.information`) to the probability of a bet. A profile has the
information sets of both players.
"""

import itertools
from collections.abc import Mapping, Sequence

from marlaas.envs.kuhn_poker import BET, CARDS, DEALS, ENDS, PASS, Moves, chips, information

Policy = Mapping[str, float]
ACTS: tuple[tuple[Moves, ...], ...] = (((), (PASS, BET)), ((PASS,), (BET,)))
"""Moves after which a player acts, by player."""
SETS = tuple(tuple(information(card, moves) for card in CARDS for moves in own) for own in ACTS)
"""Information sets by player."""


def value(profile: Policy) -> float:
    """Return the expected chips of `first`."""
    return sum(_expected(profile, deal, ()) for deal in DEALS) / len(DEALS)


def nash_conv(profile: Policy) -> float:
    """Return the sum over the players of the chips that each would gain by its best response; 0 in an equilibrium."""
    return sum(best_response(profile, player) for player in range(2))  # the players' own values cancel out


def best_response(profile: Policy, player: int) -> float:
    """Return the expected chips of a player's best response to the other player's policy."""
    return sum(_best_plan(profile, player, card) for card in CARDS) / len(DEALS)


def average(versions: Sequence[Policy]) -> dict[str, float]:
    """Return the policy that plays like a version drawn evenly before each game; all versions are of one player.

    At an information set, a version's weight is the probability that its own earlier moves lead there (Zinkevich et al.,
    2007, equation 4).
    """
    return {known: _weighted(versions, known) for known in versions[0]}


def _weighted(versions: Sequence[Policy], known: str) -> float:
    reach = [_reach(version, known) for version in versions]
    if not any(reach):  # no version plays there
        reach = [1.0] * len(versions)
    return sum(weight * version[known] for weight, version in zip(reach, versions, strict=True)) / sum(reach)


def _reach(policy: Policy, known: str) -> float:
    """Return the probability of a player's own earlier moves. The only such move is a pass, before the other player's bet."""
    card, *moves = known.split()
    return 1 - policy[card] if tuple(moves) == (PASS, BET) else 1.0


def _best_plan(profile: Policy, player: int, card: str) -> float:
    """Return the chips of the best plan with one card, summed over its deals. Plans of different cards are independent."""
    deals = [deal for deal in DEALS if deal[player] == card]
    own = [information(card, moves) for moves in ACTS[player]]
    plans = (dict(zip(own, plan, strict=True)) for plan in itertools.product((0.0, 1.0), repeat=len(own)))
    sign = 1 - 2 * player
    return max(sum(sign * _expected({**profile, **plan}, deal, ()) for deal in deals) for plan in plans)


def _expected(profile: Policy, deal: tuple[str, str], moves: Moves) -> float:
    """Return the expected chips of `first` after some moves."""
    if moves in ENDS:
        return chips(deal, moves)
    bet = profile[information(deal[len(moves) % 2], moves)]
    after = ((bet, BET), (1 - bet, PASS))
    return sum(share * _expected(profile, deal, (*moves, move)) for share, move in after if share)
