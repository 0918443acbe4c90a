import pytest

from marlaas_api.messages import ReplicaReport
from marlaas_worker.orchestrator.admission import PoolCapacity, capacities, decide, in_order

POOL = {"tiny": PoolCapacity(slots=6, max_rank=16)}


def one(document, running=(), pools=POOL):
    return decide([document], list(running), pools)[document.uid]


def test_a_job_that_fits_is_admitted(document):
    assert one(document()).admitted


@pytest.mark.parametrize(
    ("settings", "reason", "words"),
    [
        ({"rank": 32}, "RankTooLarge", "rank 32 is above the maxRank 16"),
        ({"maxStaleness": 5}, "TooManySlots", "needs 7 adapter slots"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_number(document, settings, reason, words):
    verdict = one(document(**settings))
    assert verdict.refused
    assert verdict.reason == reason
    assert words in verdict.message


def test_what_does_not_fit_now_is_queued_with_the_reason(document):
    running = [document("one", maxStaleness=1), document("two", maxStaleness=1)]
    verdict = one(document("three"), running)
    assert not verdict.admitted
    assert not verdict.refused
    assert verdict.reason == "WaitingForSlots"
    assert "needs 2 of the 6 adapter slots" in verdict.message


def test_jobs_of_one_round_do_not_share_a_slot(document):
    jobs = [document(name, maxStaleness=1) for name in ("a", "b", "c")]
    verdicts = decide(jobs, [], POOL)
    assert [verdicts[job.uid].admitted for job in jobs] == [True, True, False]


def test_a_pool_without_a_replica_is_waited_for(document):
    assert one(document(), pools={}).reason == "WaitingForPool"


def test_a_suspended_job_waits_whatever_is_free(document):
    assert one(document(suspend=True)).reason == "Suspended"


def test_priority_goes_first_then_the_name(document):
    jobs = [document("b"), document("a"), document("z", priority=1)]
    assert [job.job for job in in_order(jobs)] == ["z", "a", "b"]


def test_a_pool_offers_what_its_smallest_replica_offers():
    reports = [
        ReplicaReport(role="rollout", pool="tiny", replica="r0", slots=8, max_rank=16),
        ReplicaReport(role="rollout", pool="tiny", replica="r1", slots=4, max_rank=16),
        ReplicaReport(role="trainer", pool="tiny", replica="t0"),
    ]
    assert capacities(reports) == {"tiny": PoolCapacity(4, 16)}
