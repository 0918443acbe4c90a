"""Lasting errors are reported, and refused actions are retried only after a while."""

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
from marlaas_operator.plan import AddFinalizer, RemoveFinalizer
from marlaas_operator.work_queue import LASTING_S, REFUSED_AGAIN_S, FailureBackoff, is_refusal, is_transient

ONE = Target(RLJOBS, "team-a", "one")
ACTIONS = (AddFinalizer("x"),)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Invalid("no"), "PodRefused"), (Forbidden("no"), "PodRefused"), (BusRefused("no"), "BusUnavailable")],
)
def test_a_refusal_is_reported_at_once(error: MarlaasError, reason: str) -> None:
    backoff = FailureBackoff()
    backoff.record(ONE, error, 100.0)
    assert is_refusal(error)
    assert backoff.reportable(ONE, 100.0) == (reason, "no")


TRANSIENT = [(kind("no"), "PodRefused") for kind in (Unavailable, NoAnswer, Terminating, NotFound, TooMany, Conflict)]


@pytest.mark.parametrize(("error", "reason"), [*TRANSIENT, (BusUnavailable("no"), "BusUnavailable")])
def test_a_transient_error_is_reported_once_it_has_lasted(error: MarlaasError, reason: str) -> None:
    backoff = FailureBackoff()
    backoff.record(ONE, Unavailable("something else"), 100.0)
    backoff.record(ONE, error, 101.0)
    assert backoff.reportable(ONE, 100.0 + LASTING_S - 0.1) is None
    assert backoff.reportable(ONE, 100.0 + LASTING_S) == (reason, "no")


def test_a_success_ends_the_failures() -> None:
    assert [is_transient(kind("no")) for kind in (TooMany, Conflict, NoAnswer, Terminating)] == [
        True,
        True,
        True,
        False,
    ]
    backoff = FailureBackoff()
    backoff.record(ONE, Unavailable("no"), 100.0)
    assert (backoff.clear(ONE), backoff.clear(ONE)) == (True, False)
    backoff.record(ONE, Unavailable("no"), 109.0)
    assert backoff.reportable(ONE, 110.0) is None


def test_only_refused_actions_are_deferred_and_only_for_a_while() -> None:
    backoff = FailureBackoff()
    backoff.record(ONE, Invalid("no"), 100.0)
    backoff.defer(ONE, ACTIONS, 100.0)
    assert backoff.deferred_s(ONE, ACTIONS, 110.0) == REFUSED_AGAIN_S - 10.0
    assert backoff.deferred_s(ONE, (RemoveFinalizer("x"),), 110.0) is None
    assert backoff.deferred_s(ONE, ACTIONS, 100.0 + REFUSED_AGAIN_S) is None
    assert backoff.deferred_s(ONE, ACTIONS, 50.0) is None, "the clock was set back"
