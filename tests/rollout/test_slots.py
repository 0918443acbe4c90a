import asyncio
from itertools import count
from pathlib import Path

import pytest
from tests.harness import a_manifest, job_document

from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed, Residents
from marlaas_worker.rollout.slot_table import SlotTable
from marlaas_worker.rollout.slots import CALLED_S, Held, PastCalls, ProvenVersions

NOWHERE = Path("nowhere")


def table_with(num_slots: int, *names: str) -> SlotTable:
    table = SlotTable(num_slots)
    for name in names:
        table.ready(table.begin(name, NOWHERE))
    return table


def test_a_version_in_use_is_never_given_up() -> None:
    table = table_with(2, "a1")
    running = table.acquire("a1")
    table.begin("b1", NOWHERE)
    assert running is not None
    with pytest.raises(LoadFailed, match="still runs 1"):
        table.drop(running)
    assert [(one.name, one.num_running, one.is_ready) for one in table.residents()] == [
        ("a1", 1, True),
        ("b1", 0, False),
    ]


def test_a_version_serves_only_once_it_is_ready():
    table = SlotTable(1)
    adapter = table.begin("a1", NOWHERE)
    assert table.acquire("a1") is None
    assert [one.name for one in table.residents()] == ["a1"]
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


async def test_requests_in_the_engines_queue_do_not_keep_a_slot_and_lose_a_version_that_is_revoked():
    proven, manifest = ProvenVersions(1, count(1)), a_manifest(job_document(), 1)
    adapter, name = manifest.adapter, manifest.adapter.engine_name
    proven.add(Held(proven.table.begin(name, NOWHERE), manifest))
    async with proven.queue(adapter, "team-a"):
        assert [(one.num_queued, one.num_running) for one in proven.table.residents()] == [(1, 0)]
        proven.yield_slots(frozenset({name}))
        with proven.hold(adapter) as running:
            assert running is not None
            assert proven.table.running(name) == 1
        proven.yield_slots(frozenset({name}), revoked=frozenset({name}))
        with proven.hold(adapter) as running:
            assert running is None
        proven.remove(proven.table.loaded(name))
        with proven.hold(adapter) as running:
            assert running is None
    assert proven.tenant_of(adapter) == "team-a"
    proven.prefer(())
    assert proven.tenant_of(adapter) == ""


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


def test_what_an_engine_remembers_of_a_past_load_is_one_bit():
    residents = Residents(2)
    for number in range(1, 8001):
        residents.admit(held("a", number))
        with residents.using(held("a", number)):
            pass
        residents.remove(held("a", number))
    assert (len(residents._past), len(residents._held), len(residents._running)) == (1001, 0, 0)
    for number in (1, 4321, 8000):
        with pytest.raises(LoadFailed, match="used before"):
            residents.admit(held("a", number))


def test_a_request_that_ends_after_a_restart_disturbs_nothing():
    residents = Residents(1)
    residents.admit(held("a", 1))
    with residents.using(held("a", 1)):
        residents.clear()
        residents.admit(held("a", 2))
    assert residents.remove(held("a", 2))


async def test_a_new_group_is_not_sampled_from_a_version_that_is_too_old():
    """After a restart of the engine, a request for a past version may be served before the newest version is."""
    job = job_document()
    past, newest = (a_manifest(job, version).adapter for version in (2, 10))
    proven = ProvenVersions(2, count(1))
    proven.prefer([newest])
    proven.add(Held(proven.table.begin(past.engine_name, NOWHERE), a_manifest(job, 2)))
    assert await proven.newest_of(past, "team-a", max_staleness=8) == 2
    waiting = asyncio.create_task(proven.newest_of(past, "team-a", max_staleness=7))
    await asyncio.sleep(0)
    assert [wait.name for wait in proven.waits] == [newest.engine_name]
    proven.add(Held(proven.table.begin(newest.engine_name, NOWHERE), a_manifest(job, 10)))
    assert await waiting == 10


def test_a_past_version_may_be_called_until_its_caller_draws_another_or_some_time_has_passed() -> None:
    past, job = PastCalls(), job_document()
    versions = [a_manifest(job, version).adapter for version in range(4)]

    def called(now: float) -> list[int]:
        return [one.version for one in versions if past.may_call(one, now)]

    past.note(versions[0], "opponent", 1, 0.0)
    past.note(versions[2], "(evaluation)", 1, 1.0)
    assert called(2.0) == [0, 2]
    past.note(versions[1], "opponent", 1, 3.0)
    assert called(3.0) == [1, 2]
    past.note(versions[3], "opponent", 2, 4.0)
    past.note(versions[1], "opponent", 2, 5.0)
    assert called(5.0) == [1, 2, 3], "two steps are open"
    assert called(1.0 + CALLED_S) == [1, 3]
    past.keep([versions[0].at(0)])
    assert called(5.0) == [1, 2, 3]
    past.keep([])
    assert called(5.0) == []
