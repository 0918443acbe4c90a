"""Exact results of tic-tac-toe and of Kuhn poker against known numbers and every pure strategy, and what `bench agents` makes of them."""

import itertools
from collections.abc import Iterator

import pytest
from bench.kuhn import SETS, Policy, average, best_response, nash_conv, value
from bench.tic_tac_toe import best_moves, boards, minimax, perfect, results, uniform

from marlaas.envs.tic_tac_toe import EMPTY

RANDOM = {board: uniform(board) for board in boards()}
PERFECT = {board: perfect(board) for board in boards()}
ALL = tuple(known for own in SETS for known in own)
UNIFORM = dict.fromkeys(ALL, 0.5)


def test_the_number_of_boards_and_perfect_play_are_the_known_ones():
    assert len(RANDOM) == 4520  # 5,478 reachable boards, less those on which the game is over
    assert minimax(EMPTY) == 0
    assert best_moves("x234o6789") == list("2346789"), "o has taken the centre: x can still not lose by any move"
    assert best_moves("x23456789") == ["5"], "against a corner only the centre holds"
    assert best_moves("xx3oo6789") == ["3"]


def test_random_against_random_is_the_known_result():
    found = results(RANDOM, "x", uniform)
    assert (found.won, found.lost, found.drawn) == pytest.approx((0.5849, 0.2881, 0.1270), abs=1e-4)
    assert found.illegal == pytest.approx(0.0, abs=1e-12)


def test_a_perfect_player_never_loses():
    for mark in "xo":
        assert results(PERFECT, mark, uniform).lost == 0.0
        assert results(PERFECT, mark, perfect).drawn == pytest.approx(1.0)
        assert results(RANDOM, mark, perfect).won == 0.0


def test_what_is_missing_from_a_policys_probabilities_is_illegal():
    half = {board: {cell: share / 2 for cell, share in moves.items()} for board, moves in RANDOM.items()}
    found = results(half, "o", uniform)
    # o has at least two turns before its third mark; each is illegal with probability 1/2.
    assert found.illegal > 0.75
    assert found.won + found.drawn + found.lost + found.illegal == pytest.approx(1.0)
    assert found.value == pytest.approx(found.won - found.lost - found.illegal)
    taken = {board: {"5": 1.0} for board in boards()}
    assert results(taken, "x", uniform).illegal == 1.0, "its second move is taken by itself"


def equilibrium(bluff: float) -> Policy:
    """Kuhn's equilibria (1950): `first` bets a jack with a probability of at most 1/3, and a king three times as often."""
    first = {"jack": bluff, "queen": 0, "king": 3 * bluff, "jack pass bet": 0, "queen pass bet": bluff + 1 / 3}
    second = {"jack pass": 1 / 3, "queen pass": 0, "king pass": 1, "jack bet": 0, "queen bet": 1 / 3, "king bet": 1}
    return {**first, "king pass bet": 1, **second}


def pure(player: int) -> Iterator[dict[str, float]]:
    """All 64 pure strategies of a player."""
    for bets in itertools.product((0.0, 1.0), repeat=len(SETS[player])):
        yield dict(zip(SETS[player], bets, strict=True))


@pytest.mark.parametrize("bluff", [0, 1 / 9, 1 / 3])
def test_an_equilibrium_cannot_be_exploited_and_costs_the_first_player_an_eighteenth(bluff):
    assert value(equilibrium(bluff)) == pytest.approx(-1 / 18)
    assert nash_conv(equilibrium(bluff)) == pytest.approx(0, abs=1e-12)


def test_uniform_play_has_the_known_values():
    """A showdown is even. A quarter of the games ends bet-pass (+1), an eighth pass-bet-pass (-1)."""
    assert value(UNIFORM) == pytest.approx(1 / 8)
    assert nash_conv(UNIFORM) == pytest.approx(11 / 12)


def test_a_best_response_is_the_best_of_all_pure_strategies():
    mixed = {known: (number * 7 % 11) / 10 for number, known in enumerate(ALL)}
    assert best_response(mixed, 0) == pytest.approx(max(value(mixed | plan) for plan in pure(0)))
    assert best_response(mixed, 1) == pytest.approx(max(-value(mixed | plan) for plan in pure(1)))


def test_an_average_weighs_a_version_by_its_own_moves_to_the_information_set():
    """Passes of 3/4 and 1/4 lead to the second decision: 3/4 of 1 there, and 1/4 of 0."""
    (one, other) = (dict.fromkeys(SETS[0], bet) for bet in (0.25, 0.75))
    mean = average([one | {"king pass bet": 1.0}, other | {"king pass bet": 0.0}])
    assert (mean["king"], mean["king pass bet"]) == (0.5, pytest.approx(0.75))
    assert average([dict.fromkeys(SETS[0], 1.0)] * 2)["king pass bet"] == 1, "no version reaches this information set"
