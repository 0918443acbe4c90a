from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed, Residents
from marlaas_worker.rollout.slots import NoFreeSlot, SlotTable

NOWHERE = Path("nowhere")


def table_with(num_slots: int, *names: str) -> SlotTable:
    table = SlotTable(num_slots)
    for name in names:
        table.ready(table.begin(name, NOWHERE))
    return table


def names(adapters: tuple[LoadedAdapter, ...]) -> list[str]:
    return [adapter.name for adapter in adapters]


def test_what_is_wanted_and_missing_is_loaded_into_free_slots():
    plan = table_with(3, "a1").plan(["a1", "a2", "b1"])
    assert (plan.unload, plan.load) == ((), ("a2", "b1"))


def test_what_is_no_longer_wanted_stays_until_its_slot_is_needed():
    table = table_with(2, "a1")
    assert table.plan(["a2"]).unload == ()
    table.ready(table.begin("a2", NOWHERE))
    plan = table.plan(["a2", "a3"])
    assert (names(plan.unload), plan.load) == (["a1"], ("a3",))


def test_the_least_recently_used_goes_first():
    table = table_with(3, "a1", "b1", "c1")
    used = table.acquire("a1")
    table.release(used)
    assert names(table.plan(["d1", "e1"]).unload) == ["b1", "c1"]


def test_a_version_in_use_or_loading_is_never_given_up():
    table = table_with(2, "a1")
    running = table.acquire("a1")
    loading = table.begin("b1", NOWHERE)
    plan = table.plan(["c1", "d1"])
    assert (plan.unload, plan.load) == ((), ())
    with pytest.raises(LoadFailed, match="still runs 1"):
        table.drop(running)
    table.drop(loading)
    assert table.plan(["c1", "d1"]).load == ("c1",)


def test_the_least_urgent_waits_when_not_all_fit():
    plan = table_with(2, "old").plan(["pinned", "newest", "other"])
    assert (names(plan.unload), plan.load) == (["old"], ("pinned", "newest"))


def test_a_version_serves_only_once_it_is_ready():
    table = SlotTable(1)
    adapter = table.begin("a1", NOWHERE)
    assert table.acquire("a1") is None
    assert table.resident == ("a1",)
    table.ready(adapter)
    assert table.acquire("a1") == adapter
    assert table.running("a1") == 1


def test_numbers_are_never_used_twice_not_even_after_a_restart():
    table = table_with(2, "a1")
    first = table.acquire("a1")
    table.clear()
    again = table.begin("a1", NOWHERE)
    assert again.slot_id != first.slot_id
    table.ready(again)
    table.release(first)
    assert table.acquire("a1") == again


def test_no_slot_is_given_twice():
    table = table_with(1, "a1")
    with pytest.raises(NoFreeSlot, match="all 1"):
        table.begin("b1", NOWHERE)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["want", "run", "end"])), max_size=60))
def test_whatever_happens_there_are_never_more_versions_than_slots_and_running_ones_stay(events):
    table, running = SlotTable(3), list[LoadedAdapter]()
    for name, event in events:
        plan = table.plan([name])
        assert not {adapter.name for adapter in plan.unload} & {adapter.name for adapter in running}
        for adapter in plan.unload:
            table.drop(adapter)
        for missing in plan.load:
            table.ready(table.begin(missing, NOWHERE))
        acquired = table.acquire(name) if event == "run" else None
        running += [acquired] if acquired else []
        if event == "end" and running:
            table.release(running.pop())
        assert len(table.resident) <= 3
        assert {adapter.name for adapter in running} <= set(table.resident)


def held(name: str, slot_id: int) -> LoadedAdapter:
    return LoadedAdapter(name, slot_id, NOWHERE)


def test_an_engine_refuses_a_full_house_a_name_twice_and_an_old_number():
    residents = Residents(2)
    residents.admit(held("a", 1))
    with pytest.raises(LoadFailed, match="loaded already"):
        residents.admit(held("a", 2))
    residents.admit(held("b", 2))
    with pytest.raises(LoadFailed, match="all 2"):
        residents.admit(held("c", 3))
    assert residents.remove(held("a", 1))
    assert not residents.remove(held("a", 1))
    with pytest.raises(LoadFailed, match="used before"):
        residents.admit(held("a", 1))
    residents.admit(held("a", 3))


def test_an_engine_keeps_what_is_used_and_serves_only_what_it_holds():
    residents = Residents(2)
    residents.admit(held("a", 1))
    with residents.using(held("a", 1)), pytest.raises(LoadFailed, match="still runs 1"):
        residents.remove(held("a", 1))
    with pytest.raises(LoadFailed, match="not loaded"), residents.using(held("b", 1)):
        pass
    assert residents.remove(held("a", 1))


def test_a_request_that_ends_after_a_restart_disturbs_nothing():
    residents = Residents(1)
    residents.admit(held("a", 1))
    with residents.using(held("a", 1)):
        residents.clear()
        residents.admit(held("a", 2))
    assert residents.remove(held("a", 2))
