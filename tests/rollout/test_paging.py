"""Paging as the module states it: who is evicted, who yields, how long a version keeps its slot, and what the time of re-loads limits."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tables import rows

from marlaas_worker.rollout.paging import PageDemand, PagePlan, Resident, Urgency, Wait, order_waits, plan_pages
from marlaas_worker.rollout.reload_pace import (
    EXPECTED_S,
    MAX_CREDIT,
    MAX_QUANTUM_S,
    MIN_QUANTUM_S,
    ReloadPace,
)

NOW = 1000.0
LONG_AGO = NOW - 100
SUCCESSOR, PREFETCH = PageDemand("s", Urgency.SUCCESSOR), PageDemand("p", Urgency.PREFETCH)


def pace_of(load_s=0.02, places=1):
    """The pace of an engine whose loads take so long, with time saved up for one re-load."""
    pace = ReloadPace(places)
    pace.add_load("first", load_s, LONG_AGO, is_reload=False)
    return pace


def plan(num_slots, residents, *demands, pace=None, now=NOW):
    return plan_pages(num_slots, residents, demands, pace or pace_of(), now)


def waiting(name, is_reload=False, usage=0.0):
    return PageDemand(name, Urgency.WAITING, is_reload, usage)


def idle(name, since=LONG_AGO, **fields):
    return Resident(name, LONG_AGO, since, **fields)


def in_use(name, loaded_at=LONG_AGO, num_running=1, **fields):
    return Resident(name, loaded_at, NOW, num_running, **fields)


def test_free_slots_are_filled_by_urgency_and_idle_versions_evicted_in_order():
    assert plan(3, [idle("a")], PREFETCH, SUCCESSOR, waiting("w")).load == ("w", "s")
    old = idle("old", is_current=False)
    assert plan(3, [old]).evict == (), "a superseded version stays until its slot is needed"
    found = plan(1, [old], waiting("w"))
    assert (found.evict, found.load) == (("old",), ("w",))
    assert plan(2, [old, in_use("a")]).evict == ("old",)
    assert plan(2, [idle("b"), in_use("a")]).evict == ()
    residents = [
        in_use("recent", num_running=0),
        idle("newest", LONG_AGO + 1),
        idle("older", LONG_AGO),
        idle("strict", LONG_AGO + 2, is_strict=True),
        idle("superseded", LONG_AGO + 3, is_current=False),
    ]
    assert plan(5, residents, *map(waiting, "vwxyz")).evict == ("superseded", "strict", "older", "newest", "recent")


PAST = Resident("past", NOW, NOW, is_current=False, is_strict=True)


@pytest.mark.parametrize(("since", "fields", "load_s", "is_evicted"), rows(__file__, "evictable"))
def test_nothing_is_evicted_that_loads_runs_or_is_within_its_quantum_and_needed(since, fields, load_s, is_evicted):
    resident = Resident("one", *(NOW - seconds for seconds in since), **fields)
    assert bool(plan(1, [resident], waiting("w"), pace=pace_of(load_s)).evict) is is_evicted


@pytest.mark.parametrize(("load_s", "quantum_s"), [(0.0001, MIN_QUANTUM_S), (0.04, 2.0), (3.0, MAX_QUANTUM_S)])
def test_the_quantum_follows_the_measured_loads(load_s, quantum_s):
    assert pace_of(load_s).quantum_s == pytest.approx(quantum_s)


def test_the_next_version_of_a_tenant_that_has_used_less_is_loaded_before_those_that_others_wait_for():
    successor, other = replace(SUCCESSOR, usage=1.0), waiting("w", usage=2.0)
    assert plan(1, [], other, successor).load == ("s",)
    assert plan(1, [], other, replace(successor, usage=2.0)).load == ("w",)
    assert plan(1, [], other, replace(successor, urgency=Urgency.PREFETCH)).load == ("w",)


def test_no_version_that_is_needed_is_evicted_ahead_of_requests():
    between_turns = in_use("a", num_running=0)
    assert plan(1, [between_turns], waiting("w")).evict == ("a",)
    assert plan(1, [between_turns], SUCCESSOR).evict == ()
    assert plan(1, [replace(between_turns, has_served=False)], SUCCESSOR).evict == ("a",)
    assert plan(1, [idle("a")], PREFETCH) == PagePlan(), "nor the newest version of an idle agent to prefetch another"
    found = plan(1, [idle("old", is_current=False)], PREFETCH)
    assert (found.evict, found.load) == (("old",), ("p",))


def test_a_version_in_use_yields_after_its_quantum_to_one_that_requests_wait_for():
    residents = [in_use("a", NOW - 30), in_use("b", NOW - 40), in_use("c", NOW - 0.1), in_use("d", NOW - 20)]
    found = plan(4, residents, waiting("w"))
    assert (found.yielding, found.is_short) == ({"b"}, True)
    superseded = [*residents[:3], in_use("d", NOW - 20, is_current=False)]
    assert plan(4, superseded, waiting("w")).yielding == {"d"}
    found = plan(4, superseded, SUCCESSOR)
    assert (found.yielding, found.is_short) == (set(), True)
    assert not plan(4, superseded, PREFETCH).is_short
    assert plan(1, [in_use("a", NOW - 0.4)], waiting("w")).review_s == pytest.approx(0.6), "when a quantum ends"
    assert plan(2, [in_use("a", NOW - 0.4)]).review_s == float("inf")


def test_the_first_version_that_may_yield_does_so_even_if_an_earlier_one_may_not():
    yielding, large = in_use("small", usage=1.0, is_yielding=True), in_use("large", usage=9.0)
    assert plan(2, [yielding, large], waiting("w", usage=5.0)).yielding == {"large"}
    queued = [replace(one, num_running=0) for one in (yielding, large)]
    assert plan(2, queued, waiting("w", usage=5.0)).evict == ("large",)


def test_waits_are_ordered_by_usage_then_age():
    waits = [Wait("l1", "large", NOW - 500), Wait("s2", "small", NOW - 1), Wait("s1", "small", NOW - 2)]
    assert [wait.name for wait in order_waits(waits, {"small": 1.0, "large": 9.0}.__getitem__)] == ["s1", "s2", "l1"]


def test_a_version_in_use_yields_to_no_tenant_that_has_used_more():
    residents = [in_use("small", usage=1.0), in_use("large", usage=9.0), in_use("larger", num_running=0, usage=10.0)]
    found = plan(3, residents, waiting("w", usage=11.0))
    assert (found.evict, found.load, found.yielding, found.is_short) == ((), (), set(), True)
    same = waiting("w", usage=9.0)
    assert plan(3, residents, same).evict == ("larger",)
    residents[2] = replace(residents[2], is_yielding=True)
    found = plan(3, residents, same, waiting("v", usage=9.0))
    assert (found.evict, found.yielding, found.revoked) == (("larger",), {"large"}, set())
    residents[1] = replace(residents[1], is_yielding=True)
    found = plan(3, residents, *map(waiting, "uvw"))
    assert (found.evict, found.yielding, found.revoked) == (("larger",), {"large", "small"}, {"large", "small"})


def test_requests_that_wait_for_the_engine_keep_a_version_from_all_but_tenants_that_have_used_less():
    queued = [in_use("queued", num_running=0, num_queued=3, usage=5.0)]
    same = plan(1, queued, waiting("w", usage=5.0))
    assert (same.evict, same.yielding, same.revoked) == ((), {"queued"}, set())
    assert plan(1, queued, waiting("w", usage=4.0)).evict == ("queued",)
    assert plan(1, queued, waiting("w", usage=6.0)).yielding == set()


NAMES, TIMES, FLAGS = st.integers(0, 9).map(str), st.floats(NOW - 20, NOW), st.booleans()
NUMBERS, USAGES = st.integers(0, 2), st.floats(0, 3)
RESIDENTS = st.builds(Resident, NAMES, TIMES, TIMES, NUMBERS, NUMBERS, FLAGS, FLAGS, FLAGS, USAGES, FLAGS, FLAGS)
DEMANDS = st.builds(PageDemand, NAMES.map("d{}".format), st.sampled_from(Urgency), FLAGS, USAGES)


@given(
    st.integers(0, 3),
    st.lists(RESIDENTS, max_size=6, unique_by=lambda one: one.name),
    st.lists(DEMANDS, max_size=8, unique_by=lambda one: one.name),
)
def test_a_plan_never_needs_more_slots_than_there_are(num_free, residents, demands):
    found = plan(len(residents) + num_free, residents, *demands)
    by_name = {one.name: one for one in residents}
    assert all(by_name[name].is_ready and not by_name[name].num_running for name in found.evict)
    assert len(found.load) <= num_free + len(found.evict)
    assert len(set(found.evict)) == len(found.evict)
    assert not found.yielding & set(found.evict)
    assert found.revoked <= found.yielding
    assert found.expected <= set(found.evict)
    if any(one.num_running for one in residents):
        new = {name for name in found.yielding | found.expected if not by_name[name].is_yielding}
        assert len(new) <= 1, "there is time for one"


def test_versions_in_use_yield_only_as_far_as_there_is_time_for_their_reloads_and_give_it_back():
    pace, residents = pace_of(), [in_use("a", NOW - 30), in_use("b", NOW - 40), in_use("c", NOW - 35)]
    waits = [*map(waiting, "wxyz")]
    for _ in range(3):
        found = plan(3, residents, *waits, pace=pace)
        assert found.yielding == {"b"}
        assert 0 < found.review_s <= 1.0, "then there is time for one more"
        yields = [residents[0], replace(residents[1], is_yielding=True), residents[2]]
        assert plan(3, yields, pace=pace).yielding == set(), "it yields no more"
    assert plan(3, residents, *waits, pace=pace).yielding == {"b"}
    assert plan(3, yields, *waits, pace=pace).yielding == {"b"}, "it yields already"
    assert plan(3, yields, *waits, pace=pace, now=NOW + 1.1).yielding == {"b", "c"}


@pytest.mark.parametrize(("places", "busy", "num"), [(6, 1.0, 1), (12, 0.5, 2), (10**6, 0.2, 5)])
def test_a_reload_costs_an_engine_that_runs_few_requests_less_but_never_less_than_a_fifth(places, busy, num):
    pace, residents = pace_of(places=places), [in_use(name, NOW - 30) for name in "abcdef"]
    assert len(plan(6, residents, *map(waiting, "uvwxyz"), pace=pace).yielding) == num
    assert pace.busy(len(residents)) == busy
    left = pace.left_s(NOW, 0)
    pace.add_load("u", 0.02, NOW, is_reload=True, busy=busy)
    assert left - pace.left_s(NOW, 0) == pytest.approx(0.02 * busy)
    slow = pace_of(1.0, places=places)
    assert slow.delay_s(NOW, 0, 2, busy) >= 10.0 - 1e-6, "re-loads of a second take a tenth of the time at most"


def test_a_version_that_yields_is_evicted_first_and_its_reload_is_expected():
    residents = [in_use("a", num_running=0), in_use("b", NOW - 5, num_running=0, is_yielding=True)]
    found = plan(2, residents, waiting("w"))
    assert (found.evict, found.expected) == (("b",), {"b"})
    past = replace(residents[1], is_current=False, is_strict=True)
    found = plan(2, [residents[0], past], waiting("w"))
    assert (found.evict, found.expected) == (("b",), set()), "its step is over"


def test_the_reload_of_a_version_that_was_in_use_is_not_delayed():
    pace, busy = pace_of(), [in_use("a")]
    pace.left_s(NOW, 0)
    for name in "vwx":
        pace.expect(name, NOW)
    demands = [waiting(name, True) for name in "vwx"]
    assert plan(4, busy, *demands, pace=pace).load == ("v", "w", "x")
    assert plan(9, busy, *demands, pace=pace, now=NOW + EXPECTED_S + 0.1).load == ("v", "w", "x")
    for name in "vwx":
        pace.add_load(name, 0.02, NOW + 31, is_reload=True)
        assert name not in pace.expected(NOW + 31)


def test_few_unexpected_reloads_begin_before_there_is_time_and_prefetches_only_if_there_is():
    pace, busy = pace_of(), [in_use("a")]
    prefetched = [PageDemand(name, Urgency.PREFETCH, is_reload=True) for name in "pq"]
    assert plan(9, busy, *prefetched, pace=pace).load == ("p",)
    demands = [waiting(name, True) for name in "uvwxyz"]
    found = plan(9, busy, *demands, waiting("new"), pace=pace)
    assert found.load == ("u", "v", "w", "x", "new"), f"one for which there is time, and {MAX_CREDIT}"
    for name in "uvwx":
        pace.add_load(name, 0.02, NOW, is_reload=True)
    found = plan(9, busy, *demands[4:], pace=pace)
    assert (found.load, found.yielding) == ((), set())
    assert found.review_s == pytest.approx(1.0)
    assert plan(9, busy, *prefetched, pace=pace).load == ()
    assert plan(9, busy, *demands[4:], pace=pace, now=NOW + 1.01).load == ("y",)
    assert plan(9, [idle("a")], *demands[4:], pace=pace).load[0] == "y", "no request runs"


def test_while_reloads_exceed_their_share_versions_that_are_idle_for_seconds_keep_their_slots():
    def evicted(one, owes):
        pace = pace_of()
        pace.left_s(NOW, 0)
        for name in "vw" if owes else "":
            pace.add_load(name, 0.02, NOW, is_reload=True)
        found = plan(2, [in_use("a"), one], waiting("x"), pace=pace)
        assert found.evict or found.review_s <= 10.0
        return found.evict == (one.name,)

    five, past = idle("idle", NOW - 5), replace(PAST, loaded_at=LONG_AGO)
    for one in (five, past):
        assert (evicted(one, owes=False), evicted(one, owes=True)) == (True, False)
    assert evicted(replace(five, has_served=False), owes=True)
    assert evicted(replace(past, used_at=NOW - 1.5), owes=True), "its step is over"
    assert evicted(idle("idle", NOW - 11), owes=True)


def test_after_any_number_of_reloads_and_a_slow_one_there_is_time_again_within_a_bound():
    pace, now = pace_of(0.06), NOW
    for number in range(1000):
        now += 0.05
        demands = [waiting(f"{number}-{index}", True) for index in range(4)]
        for name in plan(9, [in_use("a")], *demands, pace=pace, now=now).load:
            pace.add_load(name, 0.06, now, is_reload=True)
    assert pace.left_s(now, 0) >= -MAX_CREDIT * 0.06
    later = now + (MAX_CREDIT + 1) * 3.0 + 0.1
    assert plan(1, [in_use("a")], waiting("w"), pace=pace, now=later).yielding == {"a"}
    slow = pace_of()
    slow.left_s(NOW, 0)
    slow.add_load("w", 60.0, NOW, is_reload=True)
    assert (slow.num_loads, slow.num_reloads, slow.reload_s) == (2, 1, 60.0)
    assert slow.left_s(NOW + 2 * MAX_QUANTUM_S, 0) >= slow.cost_s()
