import asyncio
from itertools import count
from pathlib import Path

import pytest
from tests.harness import a_manifest, job_document

from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed, Residents
from marlaas_worker.rollout.slot_table import SlotTable
from marlaas_worker.rollout.slots import Held, ProvenVersions

NOWHERE = Path("nowhere")


def test_a_version_serves_only_once_it_is_ready_and_is_never_given_up_in_use():
    table = SlotTable(2)
    adapter = table.begin("a1", NOWHERE)
    assert table.acquire("a1") is None
    table.ready(adapter)
    assert table.acquire("a1") == adapter
    table.begin("b1", NOWHERE)
    with pytest.raises(LoadFailed, match="still runs 1"):
        table.drop(adapter)
    found = [(one.name, one.num_running, one.is_ready) for one in table.residents()]
    assert found == [("a1", 1, True), ("b1", 0, False)]
    table.clear()
    again = table.begin("a1", NOWHERE)
    assert again.slot_id != adapter.slot_id, "numbers are never used twice, not even after a restart"
    table.ready(again)
    table.release(adapter)
    assert table.acquire("a1") == again


async def test_requests_in_the_engines_queue_do_not_keep_a_slot_and_lose_a_version_that_is_revoked():
    proven, manifest = ProvenVersions(1, count(1)), a_manifest(job_document(), 1)
    adapter, name = manifest.adapter, manifest.adapter.engine_name
    proven.add(Held(proven.table.begin(name, NOWHERE), manifest))

    def running():
        with proven.hold(adapter) as held:
            return None if held is None else proven.table.running(name)

    async with proven.queue(adapter, "team-a"):
        assert [(one.num_queued, one.num_running) for one in proven.table.residents()] == [(1, 0)]
        proven.yield_slots(frozenset({name}))
        assert running() == 1
        proven.yield_slots(frozenset({name}), revoked=frozenset({name}))
        assert running() is None
        proven.remove(proven.table.loaded(name))
        assert running() is None
    assert proven.tenant_of(adapter) == "team-a"
    proven.prefer(())
    assert proven.tenant_of(adapter) == ""


def held(name, slot_id):
    return LoadedAdapter(name, slot_id, NOWHERE)


def refused(residents, name, slot_id):
    with pytest.raises(LoadFailed) as error:
        residents.admit(held(name, slot_id))
    return str(error.value)


def test_an_engine_refuses_a_full_house_a_name_twice_and_an_old_number():
    residents = Residents(2)
    residents.admit(held("a", 1))
    assert "loaded already" in refused(residents, "a", 2)
    residents.admit(held("b", 2))
    assert "all 2" in refused(residents, "c", 3)
    assert [residents.remove(held("a", 1)) for _ in range(2)] == [True, False]
    assert "used before" in refused(residents, "a", 1)
    residents.admit(held("a", 3))
    with residents.using(held("a", 3)):
        residents.clear()  # a request that ends after a restart disturbs nothing
        residents.admit(held("a", 4))
    assert residents.remove(held("a", 4))


def test_what_an_engine_remembers_of_a_past_load_is_one_bit():
    residents = Residents(2)
    for number in range(1, 8001):
        residents.admit(held("a", number))
        with residents.using(held("a", number)):
            pass
        residents.remove(held("a", number))
    assert (len(residents._past), len(residents._held), len(residents._running)) == (1001, 0, 0)
    assert all("used before" in refused(residents, "a", number) for number in (1, 4321, 8000))


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
