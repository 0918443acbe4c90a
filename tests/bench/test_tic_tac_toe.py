"""Exact results of tic-tac-toe against known numbers, and what `bench agents` makes of them."""

import pytest
from bench.tic_tac_toe import best_moves, boards, minimax, perfect, results, uniform

from marlaas.envs.tic_tac_toe import EMPTY

RANDOM = {board: uniform(board) for board in boards()}
PERFECT = {board: perfect(board) for board in boards()}


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
