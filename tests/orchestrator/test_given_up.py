"""A job ends as TrainingFailed only when no trainer is left that may still take it."""

import pytest

from marlaas_api.messages import ReplicaReport
from marlaas_worker.orchestrator.faults import RETURN_S, GivenUp

WORDS = "turn 3 carries version 9"


def trainer(name: str, broken: bool, pool: str = "tiny") -> ReplicaReport:
    return ReplicaReport(role="trainer", pool=pool, replica=name, broken={"uid-sums": WORDS} if broken else {})


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ([], None),
        ([trainer("t0", True)], WORDS),
        ([trainer("t0", True), trainer("t1", False)], None),
        ([trainer("t0", True), trainer("t1", True)], WORDS),
        ([trainer("t0", False), trainer("x", True, pool="other")], None),
    ],
)
def test_a_job_is_given_up_when_every_trainer_of_its_pool_says_so(document, reports, words):
    assert GivenUp().words(document(), reports, 0.0) == words


def test_a_trainer_that_is_being_replaced_may_still_take_the_job_and_one_that_stays_away_may_not(document):
    given_up, job = GivenUp(), document()
    given_up.words(job, [trainer("t0", False), trainer("t1", False)], 1000.0)
    assert given_up.words(job, [trainer("t0", True)], 1000.0 + RETURN_S - 1) is None
    assert given_up.words(job, [trainer("t0", True)], 1000.0 + RETURN_S) == WORDS


def test_a_trainer_that_gave_the_job_up_before_its_pool_was_changed_is_asked_again(document):
    given_up, job = GivenUp(), document()
    given_up.words(job, [trainer("t0", False), trainer("t1", True)], 1000.0)
    assert given_up.words(job, [trainer("t0", True)], 1001.0) is None
    assert given_up.words(job, [trainer("t0", True), trainer("t1", False)], 1002.0) is None
