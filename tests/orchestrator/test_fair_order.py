"""Who is admitted next: by share after admission, past use and age; within a tenant by priority; a large job does not starve."""

import itertools
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.orchestrator.demands import Simulation, demand, names, order_of
from tests.tables import rows

from marlaas_worker.orchestrator.fair_order import HALF_LIFE_S, PastUse
from marlaas_worker.orchestrator.preemption import MIN_RUN_S, RunningJob, preemptions

relaxed = settings(max_examples=150, suppress_health_check=list(HealthCheck))
row = st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(-2, 2), st.integers(1, 3))
tables = st.lists(row, min_size=1, max_size=10)
NOW = 1000.0
jobs = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 4), st.integers(-1, 1)), min_size=1, max_size=16)


def admitted(waiting, total=6, **given_):
    order, found = order_of({"tiny": total}, **given_)
    order.run(waiting)
    return names(found)


@pytest.mark.parametrize(("waiting", "holding", "totals", "expected"), rows(__file__, "admitted"))
def test_who_is_admitted_first(waiting, holding, totals, expected):
    order, found = order_of(totals, [demand(**one) for one in holding])
    order.run([demand(**one) for one in waiting])
    assert names(found) == expected


def test_shares_are_divided_by_weights():
    jobs = [demand(f"{tenant}{n}", tenant, created_at=n) for tenant in "ab" for n in range(6)]
    assert sorted(admitted(jobs, weights={"a": 2.0})) == ["a0", "a1", "a2", "a3", "b0", "b1"]


def test_priority_orders_the_jobs_of_one_tenant_and_of_no_other():
    mine = [demand("m1", "a", created_at=1, priority=-5), demand("m2", "a", created_at=2, priority=5)]
    theirs = [demand("t1", "b", created_at=3, priority=-9)]
    assert admitted([*mine, *theirs], total=2) == ["m2", "t1"]
    assert admitted([*mine, *theirs], total=3)[-1] == "m1"


@relaxed
@given(table=tables, again=st.lists(st.integers(-1000, 1000), min_size=10, max_size=10), whose=st.sampled_from("abc"))
def test_as_many_jobs_of_one_size_and_age_are_admitted_whatever_their_priorities(table, again, whose):
    def counts(priorities):
        own = zip([row[0] for row in table], priorities, strict=True)
        jobs = [demand(f"j{n}", tenant, priority=priority) for n, (tenant, priority) in enumerate(own)]
        found = admitted(jobs, total=4)
        return {tenant: sum(f"j{n}" in found for n, row in enumerate(table) if row[0] == tenant) for tenant in "abc"}

    before = [row[2] for row in table]
    after = [new if row[0] == whose else old for row, old, new in zip(table, before, again, strict=False)]
    assert counts(before) == counts(after)


@pytest.mark.parametrize(("held", "queue", "total", "expected"), rows(__file__, "passing"))
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


def exchange(blocked, holding, total, *, since=0.0, weights=None, over_quota=()):
    """Names of each preemptor and of its victims."""
    order, _ = order_of({"tiny": total}, holding, weights, over_quota=over_quota)
    order.run(blocked)
    found = preemptions(order, [RunningJob(one, since) for one in holding], NOW)
    return [(one.preemptor.document.job, names(one.victims)) for one in found]


def made(name, tenant, units=1, created_at=0, priority=0):
    return demand(name, tenant, units, created_at=created_at, priority=priority)


def several(tenant, number, units=1, **fields):
    return [demand(f"{tenant}{n}", tenant, units, created_at=float(n), **fields) for n in range(number)]


def test_shares_count_by_weight():
    holding = several("a", 4)
    assert exchange([demand("new", "b")], holding, 4, weights={"a": 4.0}) == []
    assert exchange([demand("new", "b")], holding, 4, weights={"a": 3.0}) == [("new", ["a3"])]


@pytest.mark.parametrize(("ran_s", "makes_room"), [(MIN_RUN_S - 1, False), (MIN_RUN_S, True)])
def test_no_job_is_preempted_before_its_minimum_run_time(ran_s, makes_room):
    assert bool(exchange([demand("new", "b")], several("a", 4), 4, since=NOW - ran_s)) is makes_room


@pytest.mark.parametrize(("waiting", "holding", "total", "expected"), rows(__file__, "makes_room"))
def test_who_makes_room_for_whom(waiting, holding, total, expected):
    found = exchange([made(*one) for one in waiting], [made(*one) for one in holding], total)
    assert [list(one) for one in found] == expected


@pytest.mark.parametrize("total", [8, 4, 1], ids=["a whole pool", "a replica restarts", "most replicas are gone"])
def test_a_job_displaces_what_it_needs_itself_and_never_what_a_smaller_pool_lacks(total):
    assert exchange([demand("new", "b")], several("a", 8), total) == [("new", ["a7"])]


def endless(simulation, first, rows):
    """The simulation, settled with these jobs more, which never end: tenant, slots and priority."""
    for number, (tenant, units, priority) in enumerate(rows, first):
        simulation.arrive_at(float(number), f"j{number}", tenant, math.inf, units=units, priority=priority)
    simulation.settle()
    return simulation


@relaxed
@given(rows=jobs, late=jobs, weight=st.sampled_from([1.0, 2.0, 4.0]))
def test_preemptions_end_and_no_job_preempts_its_preemptor_back_while_nothing_else_changes(rows, late, weight):
    """It may once other jobs have changed the shares: hypothesis found such a trace of jobs with 4, 3, 2 and 1 slots."""
    trace = endless(Simulation(8, {"b": weight}, remembers=False, now=NOW), 0, rows)
    first = list(trace.changes)
    later = endless(trace, len(rows), late).changes[len(first) :]
    for changes, num_jobs in ((first, len(rows)), (later, len(rows) + len(late))):
        for (preemptor, victims), (next_one, next_victims) in itertools.pairwise(changes):
            assert not (next_one in victims and preemptor in next_victims)
        assert sum(len(victims) for _, victims in changes) <= num_jobs**2


@relaxed
@given(counts=st.tuples(*[st.integers(0, 12)] * 4), first=st.sampled_from("abcd"), total=st.integers(4, 12))
def test_every_tenant_ends_within_one_job_of_its_entitled_share_or_of_its_demand(counts, first, total):
    """The first tenant takes all it can before the others come."""
    weights = dict(zip("abcd", (1.0, 1.0, 2.0, 4.0), strict=True))
    demands = dict(zip("abcd", counts, strict=True))
    trace = endless(Simulation(total, weights, remembers=False, now=NOW), 0, [(first, 1, 0)] * demands[first])
    rest = [(tenant, 1, 0) for tenant in "abcd" if tenant != first for _ in range(demands[tenant])]
    endless(trace, demands[first], rest)
    active = [tenant for tenant in "abcd" if demands[tenant]]
    for tenant in active:
        entitled = total * weights[tenant] / sum(weights[one] for one in active)
        assert (
            sum(one.demand.tenant == tenant for one in trace.running.values())
            >= min(demands[tenant], entitled - 1) - 1e-9
        )
