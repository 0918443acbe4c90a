"""Which of a turn's time counts, with the times written out."""

from typing import Any

import pytest

from marlaas_worker.sandbox.turn_clock import TurnClock

BEAT, FAILED, SILENT = TurnClock.beat, TurnClock.failed, TurnClock.silent


def clock(*heard: tuple[Any, ...]) -> TurnClock:
    """A clock of a turn asked for at second 0, with 10 s for the engine and 100 s to wait, after what it heard and when."""
    made = TurnClock(timeout_s=10.0, wait_s=100.0, at=0.0)
    for hear, *words in heard:
        hear(made, *words)
    return made


@pytest.mark.parametrize(
    ("heard", "at", "left_s"),
    [
        ((), 30.0, 70.0),
        (((BEAT, None, 1.0), (BEAT, None, 50.0)), 60.0, 40.0),
        (((BEAT, None, 50.0), (BEAT, 0.5, 51.0)), 54.0, 6.5),
        (((BEAT, 3.0, 20.0), (SILENT, 25.0)), 26.0, 79.0),
        (((BEAT, 9.0, 20.0), (BEAT, None, 30.0), (BEAT, 1.0, 60.0)), 60.0, 9.0),
        (((FAILED, True, 1.0), (FAILED, True, 3.0)), 4.0, 96.0),
        (((FAILED, False, 1.0),), 4.0, 7.0),
        (((FAILED, False, 1.0), (FAILED, False, 3.0)), 4.0, 7.0),
        (((FAILED, False, 1.0), (BEAT, None, 4.0), (BEAT, 2.0, 50.0)), 50.0, 5.0),
        (((BEAT, 2.0, 20.0), (FAILED, False, 22.0), (BEAT, 0.0, 23.0)), 23.0, 5.0),
    ],
    ids=[
        "nobody answers",
        "it waits",
        "it is generated",
        "the replica falls silent",
        "the engine restarts",
        "there is no place",
        "it fails",
        "it fails again",
        "it failed and then waited",
        "its generation failed",
    ],
)
def test_only_the_engines_time_and_failures_count_against_a_turn(heard, at, left_s):
    made = clock(*heard)
    made.advance(at)
    assert made.left_s == pytest.approx(left_s)


def test_a_clock_says_what_its_time_counts_against():
    assert not clock((BEAT, None, 1.0)).counts
    assert clock((BEAT, 0.0, 1.0)).counts
    assert clock((FAILED, False, 1.0)).counts
    assert not clock((FAILED, True, 1.0)).counts
    assert not clock((BEAT, 0.0, 1.0), (SILENT, 6.0)).counts
