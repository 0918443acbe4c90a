"""What keeps failing is told when it is worth telling, and what was refused is left alone for a while."""

import pytest

from marlaas_api.bus import BusRefused, BusUnavailable
from marlaas_api.errors import MarlaasError
from marlaas_operator.cluster import (
    Conflict,
    Forbidden,
    Invalid,
    NoAnswer,
    NotFound,
    Target,
    Terminating,
    TooMany,
    Unavailable,
)
from marlaas_operator.cluster.resources import RLJOBS
from marlaas_operator.failure_backoff import LASTING_S, REFUSED_AGAIN_S, FailureBackoff, is_passing, is_refusal
from marlaas_operator.plan import AddFinalizer, RemoveFinalizer

ONE = Target(RLJOBS, "team-a", "one")
ACTIONS = (AddFinalizer("x"),)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Invalid("no"), "PodRefused"), (Forbidden("no"), "PodRefused"), (BusRefused("no"), "BusUnavailable")],
)
def test_a_refusal_is_told_at_once(error: MarlaasError, reason: str) -> None:
    troubles = FailureBackoff()
    troubles.met(ONE, error, 100.0)
    assert is_refusal(error)
    assert troubles.told(ONE, 100.0) == (reason, "no")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unavailable("no"), "PodRefused"),
        (NoAnswer("no"), "PodRefused"),
        (Terminating("no"), "PodRefused"),
        (NotFound("no"), "PodRefused"),
        (TooMany("no"), "PodRefused"),
        (Conflict("no"), "PodRefused"),
        (BusUnavailable("no"), "BusUnavailable"),
    ],
)
def test_what_may_pass_is_told_when_it_has_lasted(error: MarlaasError, reason: str) -> None:
    troubles = FailureBackoff()
    troubles.met(ONE, Unavailable("something else"), 100.0)
    troubles.met(ONE, error, 101.0)
    assert troubles.told(ONE, 100.0 + LASTING_S - 0.1) is None
    assert troubles.told(ONE, 100.0 + LASTING_S) == (reason, "no")


def test_what_went_well_ends_the_trouble() -> None:
    troubles = FailureBackoff()
    troubles.met(ONE, Unavailable("no"), 100.0)
    assert (troubles.over(ONE), troubles.over(ONE)) == (True, False)
    troubles.met(ONE, Unavailable("no"), 109.0)
    assert troubles.told(ONE, 110.0) is None


def test_only_what_was_refused_rests_and_only_for_a_while() -> None:
    troubles = FailureBackoff()
    troubles.met(ONE, Invalid("no"), 100.0)
    troubles.rest(ONE, ACTIONS, 100.0)
    assert troubles.rests_s(ONE, ACTIONS, 110.0) == REFUSED_AGAIN_S - 10.0
    assert troubles.rests_s(ONE, (RemoveFinalizer("x"),), 110.0) is None
    assert troubles.rests_s(ONE, ACTIONS, 100.0 + REFUSED_AGAIN_S) is None


def test_a_clock_that_is_set_back_makes_no_rest_longer() -> None:
    troubles = FailureBackoff()
    troubles.met(ONE, Invalid("no"), 5000.0)
    troubles.rest(ONE, ACTIONS, 5000.0)
    assert troubles.rests_s(ONE, ACTIONS, 1000.0) is None


def test_patience_and_haste_of_others_are_no_trouble_of_the_object() -> None:
    assert is_passing(TooMany("no"))
    assert is_passing(Conflict("no"))
    assert is_passing(NoAnswer("no"))
    assert not is_passing(Terminating("no"))
