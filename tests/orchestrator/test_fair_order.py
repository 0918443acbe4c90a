"""Who is admitted next: by share after admission, past use and age; within a tenant by priority; a large job does not starve."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.orchestrator.demands import demand, names, order_of

from marlaas_worker.orchestrator.shares import HALF_LIFE_S, PastUse

relaxed = settings(max_examples=150, suppress_health_check=list(HealthCheck))


def admitted(waiting, total=6, **given_):
    order, found = order_of({"tiny": total}, **given_)
    order.run(waiting)
    return names(found)


def test_first_come_first_served_within_a_tenant_whatever_the_name_and_the_order_of_arrival():
    jobs = [demand(name, "a", created_at=at) for name, at in (("a", 30), ("z", 10), ("m", 20))]
    assert admitted(jobs) == admitted(jobs[::-1]) == ["z", "m", "a"]


def test_tenants_without_a_share_go_by_the_age_of_their_next_job_and_jobs_of_one_second_by_name():
    jobs = [demand("y", "b", created_at=5), demand("x", "a", created_at=5), demand("w", "c", created_at=4)]
    assert admitted(jobs) == ["w", "x", "y"]


def test_tenants_go_by_their_share_after_admission():
    large, small = demand("large", "a", 2, created_at=1), demand("small", "b", created_at=2)
    assert admitted([large, small], total=6) == ["small", "large"]


def test_shares_are_divided_by_weights():
    jobs = [demand(f"{tenant}{n}", tenant, created_at=n) for tenant in "ab" for n in range(6)]
    assert sorted(admitted(jobs, weights={"a": 2.0})) == ["a0", "a1", "a2", "a3", "b0", "b1"]


def test_the_share_is_that_of_the_largest_resource_over_all_pools():
    holding = [demand("x", "a", 3, pool="other"), demand("y", "c")]
    order, found = order_of({"tiny": 2, "other": 4}, holding)
    order.run([demand("early", "a", created_at=1), demand("late", "b", created_at=2)])
    assert names(found) == ["late"]


@pytest.mark.parametrize("tenants", ["aa", "ab"])
def test_jobs_that_need_each_others_pools_do_not_wait_for_each_other_and_the_older_goes_first(tenants):
    jobs = [
        demand("late", tenants[1], created_at=2, pool="big", also="tiny"),
        demand("early", tenants[0], created_at=1, pool="tiny", also="big"),
    ]
    pools = {"tiny": 1, "big": 1}
    order, found = order_of(pools)
    order.run(jobs)
    assert names(found) == ["early"]
    order, found = order_of(pools, found)
    order.run(jobs[:1])
    assert names(found) == []
    order, found = order_of(pools)
    order.run(jobs[:1])
    assert names(found) == ["late"]


def test_a_job_of_two_pools_does_not_starve_behind_the_small_jobs_of_one():
    large = demand("large", "a", 4, created_at=1, pool="tiny", also="big")
    small = [demand(f"s{n}", "b", created_at=2 + n, pool="big") for n in range(4)]
    order, found = order_of({"tiny": 4, "big": 4}, [demand("holds", "c", 2, pool="big")])
    order.run([large, *small])
    assert names(found) == []


def test_priority_orders_the_jobs_of_one_tenant_and_of_no_other():
    mine = [demand("m1", "a", created_at=1, priority=-5), demand("m2", "a", created_at=2, priority=5)]
    theirs = [demand("t1", "b", created_at=3, priority=-9)]
    assert admitted([*mine, *theirs], total=2) == ["m2", "t1"]
    assert admitted([*mine, *theirs], total=3)[-1] == "m1"


rows = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(-2, 2), st.integers(1, 3)), min_size=1, max_size=10
)


@relaxed
@given(table=rows, again=st.lists(st.integers(-1000, 1000), min_size=10, max_size=10), whose=st.sampled_from("abc"))
def test_jobs_of_one_size_and_age_are_admitted_in_the_same_number_whatever_priorities_their_tenant_gives(
    table, again, whose
):
    def counts(priorities):
        jobs = [
            demand(f"j{n}", tenant, priority=p)
            for n, ((tenant, *_), p) in enumerate(zip(table, priorities, strict=True))
        ]
        found = admitted(jobs, total=4)
        return {tenant: sum(f"j{n}" in found for n, row in enumerate(table) if row[0] == tenant) for tenant in "abc"}

    before = [row[2] for row in table]
    after = [new if row[0] == whose else old for row, old, new in zip(table, before, again, strict=False)]
    assert counts(before) == counts(after)


@pytest.mark.parametrize(
    ("held", "queue", "total", "expected"),
    [
        ([3, 3], [4, 2], 8, []),
        ([3, 3], [3, 2], 8, ["1"]),
        ([6], [4, 2, 2], 8, ["1"]),
        ([2, 2, 2], [4, 2, 2], 8, []),
        ([2, 2, 2], [2, 4, 2], 8, ["0"]),
        ([], [3, 3, 3, 2], 8, ["0", "1", "3"]),
        ([9], [2], 8, []),
    ],
)
def test_a_tenants_job_passes_its_earlier_one_only_if_that_one_never_waits_longer_for_it(held, queue, total, expected):
    """Of 8 slots. (3, 3) held, 2 free: 4 and 3 start when one of them ends, with 5 free. 4 and 2 are more than 5; 3 and 2 are not."""
    holding = [demand(f"held-{n}", "a", units) for n, units in enumerate(held)]
    waiting = [demand(f"{n}", "a", units, created_at=n) for n, units in enumerate(queue)]
    assert admitted(waiting, total, holding=holding) == expected


def test_a_large_job_of_the_least_served_tenant_is_not_passed_by_small_jobs_of_others():
    """By the share after admission alone, b's jobs would go first for ever."""
    running = [demand(f"r{n}", "b", created_at=n) for n in range(5)]
    large = demand("large", "a", 6, created_at=50)
    small = [demand(f"s{n}", "b", created_at=n) for n in range(10, 20)]
    assert admitted([large, *small], holding=running) == []
    assert admitted([large, *small], holding=running[:0]) != ["large"], "it does not fit beside what is admitted first"
    order, found = order_of({"tiny": 6})
    order.run([large])
    assert names(found) == ["large"]


def test_small_jobs_pass_a_large_one_whose_tenant_has_its_share_already():
    running = [demand("r", "a", 4)]
    waiting = [demand("large", "a", 3, created_at=1), demand("small", "b", 2, created_at=2)]
    assert admitted(waiting, holding=running) == ["small"]


def test_a_job_over_quota_takes_no_turn_and_guards_nothing():
    refused = demand("over", "a", 6, created_at=1)
    small = demand("small", "b", created_at=2)
    assert admitted([refused, small], holding=[demand("r", "c")], over_quota=[refused]) == ["small"]


def test_of_tenants_with_equal_shares_the_one_that_used_less_goes_first():
    past = PastUse()
    past.enter("a", 0.5)
    jobs = [demand("early", "a", created_at=1), demand("late", "b", created_at=2)]
    assert admitted(jobs, total=1, past=past) == ["late"]


def test_past_use_is_the_share_over_time_and_halves_every_half_life():
    past = PastUse()
    past.advance(0.0, {"a": 0.5})
    past.advance(10.0, {"a": 0.5})
    assert past.of("a") == pytest.approx(5.0, rel=0.01)
    before = past.of("a")
    past.advance(10.0 + HALF_LIFE_S, {})
    assert past.of("a") == pytest.approx(before / 2)
    past.advance(5.0, {"a": 1.0})
    assert past.of("a") == pytest.approx(before / 2), "a clock that was set back adds nothing"
