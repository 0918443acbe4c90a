"""The time of re-loads: which evictions and re-loads it limits, and what counts."""

from dataclasses import replace

import pytest
from tests.rollout.pages import LONG_AGO, NOW, idle, in_use, pace_of, plan, waiting

from marlaas_worker.rollout.paging import PageDemand, Resident, Urgency, plan_pages
from marlaas_worker.rollout.reload_pace import EXPECTED_S, MAX_CREDIT, MAX_QUANTUM_S, MIN_QUANTUM_S


def test_versions_in_use_yield_only_as_far_as_there_is_time_for_their_reloads() -> None:
    pace, residents = pace_of(0.02), [in_use("a", NOW - 30), in_use("b", NOW - 40), in_use("c", NOW - 35)]
    waits = [*map(waiting, "wxyz")]
    found = plan(3, residents, *waits, pace=pace)
    assert found.yielding == {"b"}
    assert 0 < found.review_s <= 1.0, "then there is time for one more"
    residents[1] = replace(residents[1], is_yielding=True)
    assert plan(3, residents, *waits, pace=pace).yielding == {"b"}, "it yields already"
    assert plan_pages(3, residents, waits, pace, NOW + 1.1).yielding == {"b", "c"}


def test_a_version_that_yields_no_more_gives_its_time_back() -> None:
    pace, residents = pace_of(0.02), [in_use("a", NOW - 30), in_use("b", NOW - 40)]
    for _ in range(3):
        assert plan(2, residents, waiting("w"), pace=pace).yielding == {"b"}
        assert plan(2, [residents[0], replace(residents[1], is_yielding=True)], pace=pace).yielding == set()


def test_a_version_that_yields_is_evicted_first_and_its_reload_is_expected() -> None:
    residents = [in_use("a", num_running=0), in_use("b", NOW - 5, num_running=0)]
    residents[1] = replace(residents[1], is_yielding=True)
    found = plan(2, residents, waiting("w"))
    assert (found.evict, found.expected) == (("b",), {"b"})
    past = replace(residents[1], is_current=False, is_strict=True)
    found = plan(2, [residents[0], past], waiting("w"))
    assert (found.evict, found.expected) == (("b",), set()), "its step is over"


def test_no_version_that_is_needed_is_evicted_ahead_of_requests() -> None:
    between_turns = in_use("a", num_running=0)
    assert plan(1, [between_turns], waiting("w")).evict == ("a",)
    assert plan(1, [between_turns], PageDemand("s", Urgency.SUCCESSOR)).evict == ()
    assert plan(1, [replace(between_turns, has_served=False)], PageDemand("s", Urgency.SUCCESSOR)).evict == ("a",)


@pytest.mark.parametrize(("load_s", "quantum_s"), [(0.0001, MIN_QUANTUM_S), (0.04, 2.0), (3.0, MAX_QUANTUM_S)])
def test_the_quantum_follows_the_measured_loads(load_s: float, quantum_s: float) -> None:
    assert pace_of(load_s).quantum_s == pytest.approx(quantum_s)


def test_the_reload_of_a_version_that_was_in_use_is_not_delayed() -> None:
    pace, busy = pace_of(0.02), [in_use("a")]
    pace.room_s(NOW, 0)
    for name in "vwx":
        pace.expect(name, NOW)
    demands = [waiting(name, True) for name in "vwx"]
    assert plan(4, busy, *demands, pace=pace).load == ("v", "w", "x")
    assert plan_pages(9, busy, demands, pace, NOW + EXPECTED_S + 0.1).load == ("v", "w", "x")
    for name in "vwx":
        pace.note(name, 0.02, NOW + 31, is_reload=True)
        assert name not in pace.expected(NOW + 31)


def test_few_unexpected_reloads_begin_before_there_is_time() -> None:
    pace, busy = pace_of(0.02), [in_use("a")]
    demands = [waiting(name, True) for name in "uvwxyz"]
    found = plan(9, busy, *demands, waiting("new"), pace=pace)
    assert found.load == ("u", "v", "w", "x", "new"), f"one for which there is time, and {MAX_CREDIT}"
    for name in "uvwx":
        pace.note(name, 0.02, NOW, is_reload=True)
    found = plan(9, busy, *demands[4:], pace=pace)
    assert (found.load, found.yielding) == ((), set())
    assert found.review_s == pytest.approx(1.0)
    assert plan_pages(9, busy, demands[4:], pace, NOW + 1.01).load == ("y",)
    assert plan(9, [idle("a")], *demands[4:], pace=pace).load[0] == "y", "no request runs"


def test_versions_that_no_request_waits_for_are_loaded_again_only_if_there_is_time() -> None:
    pace, busy = pace_of(0.02), [in_use("a")]
    demands = [PageDemand(name, Urgency.PREFETCH, is_reload=True) for name in "vw"]
    assert plan(9, busy, *demands, pace=pace).load == ("v",)
    pace.note("v", 0.02, NOW, is_reload=True)
    assert plan(9, busy, demands[1], pace=pace).load == ()


def test_while_reloads_exceed_their_share_versions_that_are_idle_for_seconds_keep_their_slots() -> None:
    def evicted(one: Resident, *, owes: bool) -> bool:
        pace = pace_of(0.02)
        pace.room_s(NOW, 0)
        for name in "vw" if owes else "":
            pace.note(name, 0.02, NOW, is_reload=True)
        found = plan(2, [in_use("a"), one], waiting("x"), pace=pace)
        assert found.evict or found.review_s <= 10.0
        return found.evict == ("idle",)

    five, past = idle("idle", NOW - 5), Resident("idle", LONG_AGO, NOW, is_current=False, is_strict=True)
    assert (evicted(five, owes=False), evicted(five, owes=True)) == (True, False)
    assert (evicted(past, owes=False), evicted(past, owes=True)) == (True, False)
    assert evicted(replace(five, has_served=False), owes=True)
    assert evicted(replace(past, used_at=NOW - 1.5), owes=True), "its step is over"
    assert evicted(idle("idle", NOW - 11), owes=True)


def test_after_any_number_of_reloads_there_is_time_again_within_a_bound() -> None:
    pace, now = pace_of(0.06), NOW
    for number in range(1000):
        now += 0.05
        demands = [waiting(f"{number}-{index}", True) for index in range(4)]
        for name in plan_pages(9, [in_use("a")], demands, pace, now).load:
            pace.note(name, 0.06, now, is_reload=True)
    assert pace.room_s(now, 0) >= -MAX_CREDIT * 0.06
    assert plan_pages(1, [in_use("a")], [waiting("w")], pace, now + (MAX_CREDIT + 1) * 3.0 + 0.1).yielding == {"a"}


def test_a_slow_reload_delays_the_next_by_a_bounded_time() -> None:
    pace = pace_of(0.02)
    pace.room_s(NOW, 0)
    pace.note("w", 60.0, NOW, is_reload=True)
    assert (pace.num_loads, pace.num_reloads, pace.reload_s) == (2, 1, 60.0)
    assert pace.room_s(NOW + 2 * MAX_QUANTUM_S, 0) >= pace.price_s
