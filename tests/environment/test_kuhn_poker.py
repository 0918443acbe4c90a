"""Kuhn poker's rules: who acts on what, which reply is which move, and chips computed by hand."""

import string

import pytest
from tests.environment.playing import play_moves

from marlaas.environment import Split, Task
from marlaas.envs.kuhn_poker import BET, DEALS, PASS, PLAYERS, move_of
from marlaas.envs.playing import Outcome

KING_JACK, JACK_KING = DEALS.index(("king", "jack")), DEALS.index(("jack", "king"))


def play(index: int, *replies: str, split: Split = Split.TRAIN) -> tuple[Outcome, list[tuple[str, str]]]:
    return play_moves("kuhn-poker", {}, PLAYERS, replies, Task(split, index, 7))


@pytest.mark.parametrize(
    ("moves", "higher", "lower"),
    [("pp", 1, -1), ("bp", 1, 1), ("bb", 2, -2), ("pbp", -1, -1), ("pbb", 2, -2)],
)
def test_the_chips_of_every_end_with_the_higher_and_the_lower_card(moves: str, higher: int, lower: int) -> None:
    for index, won in ((KING_JACK, higher), (JACK_KING, lower)):
        outcome, _ = play(index, *moves)
        assert outcome.rewards == {"first": won, "second": -won}
        assert outcome.ending == "completed"


def test_a_player_is_told_its_own_card_and_the_moves_only() -> None:
    _, told = play(KING_JACK, "p", "b", "b")
    assert told == [("first", "kuhn: king"), ("second", "kuhn: jack pass"), ("first", "kuhn: king pass bet")]


def test_the_first_six_tasks_are_the_six_deals_in_both_splits() -> None:
    for split in Split:
        dealt = [[text for _, text in play(index, "p", "p", split=split)[1]] for index in range(7)]
        assert dealt[:6] == [[f"kuhn: {first}", f"kuhn: {second} pass"] for first, second in DEALS]
        assert dealt[6] == dealt[0]
    assert len(set(DEALS)) == 6
    assert all(first != second for first, second in DEALS)


@pytest.mark.parametrize("reply", ["", " bet", "\n", "n", "Zebra", "7", "?", "pass", "é", "\ufffd"])
def test_any_other_reply_is_a_pass(reply: str) -> None:
    assert move_of(reply) == PASS


def test_letters_of_the_first_half_of_the_alphabet_are_bets() -> None:
    assert {letter for letter in string.ascii_letters if move_of(letter + "?") == BET} == set(
        "abcdefghijklmABCDEFGHIJKLM"
    )
    assert move_of("bet") == BET


@pytest.mark.parametrize(
    ("index", "moves", "metrics"),
    [
        (JACK_KING, "bp", {"opened": 1, "bluffed": 1, "called": 0, "showdown": 0}),
        (KING_JACK, "pbb", {"opened": 0, "bluffed": 1, "called": 1, "showdown": 1}),
        (JACK_KING, "pbb", {"opened": 0, "bluffed": 0, "called": 1, "showdown": 1}),
        (JACK_KING, "pp", {"opened": 0, "bluffed": 0, "called": 0, "showdown": 1}),
    ],
)
def test_metrics_tell_what_happened(index: int, moves: str, metrics: dict[str, float]) -> None:
    assert play(index, *moves)[0].metrics == metrics
