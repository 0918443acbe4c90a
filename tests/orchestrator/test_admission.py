"""Who runs and who waits, in which order: tables, and properties of any queue."""

from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.harness import changed

from marlaas_api.messages import JobDocument, ReplicaReport
from marlaas_worker.orchestrator.admission import PoolCapacity, capacities, decide, queue_order

POOL = {"tiny": PoolCapacity(slots=6, max_rank=16, max_model_len=2048)}
relaxed = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


def one(document, holding=(), pools=POOL):
    return decide([document], list(holding), pools)[document.uid]


def of(document: JobDocument, tenant: str) -> JobDocument:
    uid = f"{tenant}-{document.job}"
    return document.model_copy(update={"namespace": f"{tenant}-1", "tenant": tenant, "uid": uid})


def sized(document, name: str, slots: int, **more: float) -> JobDocument:
    return document(name, maxStaleness=slots - 2, **more)


def names(documents) -> list[str]:
    return [document.job for document in documents]


@pytest.mark.parametrize(
    ("settings", "reason", "words"),
    [
        ({}, "Admitted", ""),
        ({"rank": 32}, "WaitingForPool", "has adapter rank 32, and maxRank is 16 in a replica of pool tiny"),
        (
            {"maxStaleness": 5},
            "WaitingForPool",
            "needs 7 adapter slots (maxStaleness + 2 for each agent), and there are 6 in a replica",
        ),
        ({"suspend": True}, "Suspended", ""),
    ],
)
def test_a_job_that_fits_is_admitted_and_one_that_does_not_waits_with_both_numbers(document, settings, reason, words):
    verdict = one(document(**settings))
    assert (verdict.admitted, verdict.reason) == (reason == "Admitted", reason)
    assert words in verdict.message


@pytest.mark.parametrize(("longest", "admitted"), [(0, True), (128, False), (129, True)])
def test_a_reply_that_leaves_no_room_for_a_prompt_in_a_replica_of_now_waits(document, longest, admitted):
    job = document()
    job = changed(job, rollout=job.spec.rollout.model_copy(update={"max_tokens": 128}))
    assert one(job, pools={"tiny": PoolCapacity(6, 16, longest)}).admitted is admitted


def test_what_does_not_fit_beside_the_others_is_queued_with_the_reason(document):
    holding = [document("one", maxStaleness=1), document("two", maxStaleness=1)]
    verdict = one(document("three"), holding)
    assert (verdict.admitted, verdict.reason) == (False, "WaitingForSlots")
    assert "needs 2 of the 6 adapter slots of pool tiny" in verdict.message
    assert not one(document(), [document("one", maxStaleness=6)]).admitted, "it keeps more slots than there are now"
    assert one(document(), pools={}).reason == "WaitingForPool"


def test_jobs_of_one_round_do_not_share_a_slot(document):
    jobs = [document(name, maxStaleness=1) for name in ("a", "b", "c")]
    verdicts = decide(jobs, [], POOL)
    assert [verdicts[job.uid].admitted for job in jobs] == [True, True, False]


def test_several_agents_are_waited_for_since_an_upgrade_may_bring_them(document):
    job = document()
    agents = (job.spec.agents[0], job.spec.agents[0].model_copy(update={"name": "second"}))
    verdict = one(changed(job, agents=agents))
    assert (verdict.admitted, verdict.reason) == (False, "UnsupportedAgents")


def test_first_come_first_served_and_jobs_of_the_same_second_by_namespace_and_name(document):
    jobs = [document("a", created_at=30), document("z", created_at=10), document("m", created_at=20)]
    assert names(queue_order(jobs)) == names(queue_order(jobs[::-1])) == ["z", "m", "a"]
    jobs = [of(document("a"), "team-b"), of(document("z"), "team-a"), of(document("b"), "team-a")]
    assert names(queue_order(jobs)) == ["b", "z", "a"]


def test_priority_permutes_the_positions_of_one_tenant_and_of_nobody_else(document):
    mine = [of(document(name, created_at=at), "mine") for name, at in (("m1", 10), ("m2", 30), ("m3", 50))]
    mine[2] = of(document("m3", created_at=50, priority=5), "mine")
    others = [of(document(name, created_at=at, priority=-9), "other") for name, at in (("o1", 20), ("o2", 40))]
    assert names(queue_order([*mine, *others])) == ["m3", "o1", "m1", "o2", "m2"]


@st.composite
def queues(draw) -> list[tuple[str, float, int]]:
    """Tenant, creation time and priority of each job."""
    rows = st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 5).map(float), st.integers(-2, 2))
    return draw(st.lists(rows, min_size=1, max_size=10))


@relaxed
@given(rows=queues(), again=st.lists(st.integers(-1000, 1000), min_size=10, max_size=10), whose=st.sampled_from("abc"))
def test_whatever_priorities_a_tenant_gives_no_other_tenants_job_moves(document, rows, again, whose):
    before, after = (
        queue_order(of(document(f"j{n}", created_at=at, priority=p), tenant) for n, (tenant, at, p) in enumerate(table))
        for table in (rows, [(t, at, new if t == whose else p) for (t, at, p), new in zip(rows, again, strict=False)])
    )
    others = [(n, one.uid) for n, one in enumerate(before) if one.tenant != whose]
    assert [(n, one.uid) for n, one in enumerate(after) if one.tenant != whose] == others


def test_a_job_of_another_pool_or_one_that_cannot_run_gives_its_position_to_nobody(document):
    """Otherwise a tenant would get ahead with jobs that never run."""
    early = [
        of(document("rests", created_at=1, suspend=True), "mine"),
        of(document("too-large", created_at=2, maxStaleness=9), "mine"),
        of(document("elsewhere", created_at=3), "mine").model_copy(update={"pool": "other"}),
    ]
    first = of(sized(document, "first", 6, created_at=4), "other")
    late = of(sized(document, "late", 6, created_at=5, priority=9), "mine")
    verdicts = decide([late, first, *early], [], POOL)
    assert [job.job for job in (*early, first, late) if verdicts[job.uid].admitted] == ["first"]


@pytest.mark.parametrize(
    ("held", "queue", "admitted"),
    [
        ([3, 3], [4, 2], []),
        ([3, 3], [5, 2], []),
        ([3, 3], [3, 2], [1]),
        ([6], [4, 2], [1]),
        ([6], [4, 2, 2], [1]),
        ([2, 2, 2], [4, 2, 2], []),
        ([2, 2, 2], [2, 4, 2], [0]),
        ([], [3, 3, 3, 2], [0, 1, 3]),
        ([9], [2], []),
    ],
)
def test_a_job_passes_one_that_waits_only_if_that_one_never_waits_longer_for_it(document, held, queue, admitted):
    """Of 8 slots. (3, 3) held, 2 free: who needs 4 or 3 starts when one of them ends, with 5 free. 4 and 2 are more than 5; 3 and 2 are not.
    Who needs 5 would start then too, and not with 2 taken."""
    holding = [sized(document, f"held-{n}", need) for n, need in enumerate(held)]
    waiting = [sized(document, f"{n}", need, created_at=n) for n, need in enumerate(queue)]
    verdicts = decide(waiting, holding, {"tiny": PoolCapacity(8, 16)})
    assert [n for n, job in enumerate(waiting) if verdicts[job.uid].admitted] == admitted


@relaxed
@given(
    held=st.lists(st.integers(2, 5), max_size=5),
    queue=st.lists(st.integers(2, 8), max_size=6),
    slots=st.integers(8, 12),
)
def test_whichever_jobs_end_the_first_that_waits_starts_as_if_nobody_had_passed_it(document, held, queue, slots):
    holding = [sized(document, f"held-{n}", need) for n, need in enumerate(held)]
    waiting = [sized(document, f"{n}", need, created_at=n) for n, need in enumerate(queue)]
    verdicts = decide(waiting, holding, {"tiny": PoolCapacity(slots, 16)})
    started = [need for need, job in zip(queue, waiting, strict=True) if verdicts[job.uid].admitted]
    blocked = next((n for n, job in enumerate(waiting) if not verdicts[job.uid].admitted), None)
    if blocked is None:
        return
    before = started[:blocked]
    passed = sum(started[blocked:])
    running = [*held, *before]
    for number in range(len(running) + 1):
        for ended in combinations(range(len(running)), number):
            used = sum(need for n, need in enumerate(running) if n not in ended)
            assert (used + queue[blocked] <= slots) == (used + passed + queue[blocked] <= slots)


def test_a_pool_offers_what_its_smallest_replica_that_serves_offers():
    reports = [
        ReplicaReport(role="rollout", pool="tiny", replica="r0", slots=8, max_rank=16, max_model_len=512),
        ReplicaReport(role="rollout", pool="tiny", replica="r1", slots=4, max_rank=32, max_model_len=0),
        ReplicaReport(role="rollout", pool="tiny", replica="r2", slots=2, max_rank=8, ready=False),
        ReplicaReport(role="trainer", pool="tiny", replica="t0"),
    ]
    assert capacities(reports) == {"tiny": PoolCapacity(4, 16, 512)}
