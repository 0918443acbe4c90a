"""Paging as the module states it: who is evicted, who yields, how long a version keeps its slot."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.pages import LONG_AGO, NOW, idle, in_use, pace_of, plan, used, waiting

from marlaas_worker.rollout.paging import PageDemand, PagePlan, Resident, Urgency, Wait, order_waits


def test_free_slots_are_filled_by_urgency() -> None:
    demands = [PageDemand("p", Urgency.PREFETCH), PageDemand("s", Urgency.SUCCESSOR), waiting("w")]
    assert plan(3, [idle("a")], *demands).load == ("w", "s")


def test_a_superseded_version_stays_until_its_slot_is_needed() -> None:
    old = idle("old", is_current=False)
    assert plan(3, [old]).evict == ()
    found = plan(1, [old], waiting("w"))
    assert (found.evict, found.load) == (("old",), ("w",))


def test_one_slot_is_freed_ahead_of_need_if_a_version_is_superseded_and_idle() -> None:
    assert plan(2, [idle("old", is_current=False), in_use("a")]).evict == ("old",)
    assert plan(2, [idle("b"), in_use("a")]).evict == ()


def test_idle_versions_are_evicted_in_this_order_superseded_strict_newest() -> None:
    residents = [
        in_use("recent", num_running=0),
        idle("newest", LONG_AGO + 1),
        idle("older", LONG_AGO),
        idle("strict", LONG_AGO + 2, is_strict=True),
        idle("superseded", LONG_AGO + 3, is_current=False),
    ]
    found = plan(5, residents, *map(waiting, "vwxyz"))
    assert found.evict == ("superseded", "strict", "older", "newest", "recent")


@pytest.mark.parametrize(
    "kept",
    [
        Resident("loading", NOW - 50, NOW - 50, is_ready=False),
        Resident("runs", LONG_AGO, LONG_AGO, num_running=1),
        Resident("within its quantum", NOW - 0.1, NOW - 0.05),
    ],
    ids=lambda one: one.name,
)
def test_nothing_is_evicted_that_loads_runs_or_is_within_its_quantum(kept: Resident) -> None:
    assert plan(1, [kept], waiting("w")).evict == ()


def test_a_version_without_recent_requests_is_evicted_within_its_quantum() -> None:
    pace = pace_of(0.2)
    assert pace.quantum_s == pytest.approx(10.0)
    assert plan(1, [Resident("a", NOW - 2, NOW - 2)], waiting("w"), pace=pace).evict == ("a",)


def test_a_past_version_of_a_strict_job_is_evicted_as_soon_as_no_request_runs() -> None:
    past = Resident("past", NOW, NOW, is_current=False, is_strict=True)
    assert plan(1, [past], waiting("w")).evict == ("past",)
    for kept in (replace(past, num_running=1), replace(past, is_strict=False), replace(past, is_current=True)):
        assert plan(1, [kept], waiting("w")).evict == ()


def test_the_next_version_of_a_tenant_that_has_used_less_is_loaded_before_those_that_others_wait_for() -> None:
    successor, other = PageDemand("s", Urgency.SUCCESSOR, usage=1.0), PageDemand("w", Urgency.WAITING, usage=2.0)
    assert plan(1, [], other, successor).load == ("s",)
    assert plan(1, [], other, replace(successor, usage=2.0)).load == ("w",)
    assert plan(1, [], other, replace(successor, urgency=Urgency.PREFETCH)).load == ("w",)


def test_the_newest_version_of_an_idle_agent_is_not_evicted_to_prefetch_another() -> None:
    assert plan(1, [idle("a")], PageDemand("b", Urgency.PREFETCH)) == PagePlan()
    found = plan(1, [idle("old", is_current=False)], PageDemand("b", Urgency.PREFETCH))
    assert (found.evict, found.load) == (("old",), ("b",))


def test_a_version_in_use_yields_after_its_quantum_to_one_that_requests_wait_for() -> None:
    residents = [in_use("a", NOW - 30), in_use("b", NOW - 40), in_use("c", NOW - 0.1), in_use("d", NOW - 20)]
    found = plan(4, residents, waiting("w"))
    assert (found.yielding, found.is_short) == ({"b"}, True)
    superseded = [*residents[:3], in_use("d", NOW - 20, is_current=False)]
    assert plan(4, superseded, waiting("w")).yielding == {"d"}
    found = plan(4, superseded, PageDemand("e", Urgency.SUCCESSOR))
    assert (found.yielding, found.is_short) == (set(), True)
    assert not plan(4, superseded, PageDemand("e", Urgency.PREFETCH)).is_short


def test_the_first_version_that_may_yield_does_so_even_if_an_earlier_one_may_not() -> None:
    yielding = Resident("small", LONG_AGO, NOW, 1, usage=1.0, is_yielding=True)
    found = plan(2, [yielding, used("large", 9.0)], PageDemand("w", Urgency.WAITING, usage=5.0))
    assert found.yielding == {"large"}
    queued = [replace(yielding, num_running=0), used("large", 9.0, num_running=0)]
    assert plan(2, queued, PageDemand("w", Urgency.WAITING, usage=5.0)).evict == ("large",)


def test_the_next_review_is_when_a_quantum_ends() -> None:
    found = plan(1, [in_use("a", NOW - 0.4)], waiting("w"), pace=pace_of(0.02))
    assert found.review_s == pytest.approx(0.6)
    assert plan(2, [in_use("a", NOW - 0.4)]).review_s == float("inf")


def test_waits_are_ordered_by_usage_then_age() -> None:
    usage: Callable[[str], float] = {"small": 1.0, "large": 9.0}.__getitem__
    waits = [Wait("l1", "large", NOW - 500), Wait("s2", "small", NOW - 1), Wait("s1", "small", NOW - 2)]
    assert [wait.name for wait in order_waits(waits, usage)] == ["s1", "s2", "l1"]


def test_a_version_in_use_yields_to_no_tenant_that_has_used_more() -> None:
    residents = [used("small", 1.0), used("large", 9.0), used("larger", 10.0, num_running=0)]
    more = PageDemand("w", Urgency.WAITING, usage=11.0)
    found = plan(3, residents, more)
    assert (found.evict, found.load, found.yielding, found.is_short) == ((), (), set(), True)
    same = PageDemand("w", Urgency.WAITING, usage=9.0)
    assert plan(3, residents, same).evict == ("larger",)
    residents[2] = replace(residents[2], is_yielding=True)
    found = plan(3, residents, same, PageDemand("v", Urgency.WAITING, usage=9.0))
    assert (found.evict, found.yielding, found.revoked) == (("larger",), {"large"}, set())
    residents[1] = replace(residents[1], is_yielding=True)
    less = [PageDemand(name, Urgency.WAITING, usage=0.0) for name in "uvw"]
    found = plan(3, residents, *less)
    assert (found.evict, found.yielding, found.revoked) == (("larger",), {"large", "small"}, {"large", "small"})


def test_requests_that_wait_for_the_engine_keep_a_version_from_all_but_tenants_that_have_used_less() -> None:
    residents = [used("queued", 5.0, num_running=0, num_queued=3)]
    same = plan(1, residents, PageDemand("w", Urgency.WAITING, usage=5.0))
    assert (same.evict, same.yielding, same.revoked) == ((), {"queued"}, set())
    assert plan(1, residents, PageDemand("w", Urgency.WAITING, usage=4.0)).evict == ("queued",)
    assert plan(1, residents, PageDemand("w", Urgency.WAITING, usage=6.0)).yielding == set()


RESIDENTS = st.builds(
    Resident,
    st.integers(0, 9).map(lambda number: f"r{number}"),
    st.floats(NOW - 20, NOW),
    st.floats(NOW - 20, NOW),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.floats(0, 3),
    st.booleans(),
    st.booleans(),
)
DEMANDS = st.builds(
    PageDemand,
    st.integers(0, 9).map(lambda number: f"d{number}"),
    st.sampled_from(Urgency),
    st.booleans(),
    st.floats(0, 3),
)


@given(
    st.integers(0, 3),
    st.lists(RESIDENTS, max_size=6, unique_by=lambda one: one.name),
    st.lists(DEMANDS, max_size=8, unique_by=lambda one: one.name),
)
def test_a_plan_never_needs_more_slots_than_there_are(
    num_free: int, residents: list[Resident], demands: list[PageDemand]
) -> None:
    found = plan(len(residents) + num_free, residents, *demands)
    by_name = {one.name: one for one in residents}
    assert all(by_name[name].is_ready and not by_name[name].num_running for name in found.evict)
    assert len(residents) - len(found.evict) + len(found.load) <= len(residents) + num_free
    assert len(set(found.evict)) == len(found.evict)
    assert not found.yielding & set(found.evict)
    assert found.revoked <= found.yielding
    assert found.expected <= set(found.evict)
    if any(one.num_running for one in residents):
        new = {name for name in found.yielding | found.expected if not by_name[name].is_yielding}
        assert len(new) <= 1, "there is time for one"
