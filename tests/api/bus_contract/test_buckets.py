"""Keys: who writes them, and who hears of it."""

import asyncio

import pytest
from tests.api.bus_contract.asking import BRIEF, Connect, soon, take

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusRefused, Entry, RevisionConflict
from marlaas_api.names import namespace_tenant


async def test_a_key_is_written_read_and_overwritten(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.TENANTS)
    key = subjects.tenant_usage_key(namespace_tenant(ns))
    assert await bucket.get(key) is None
    first = await bucket.put(key, b"1")
    assert await bucket.get(key) == Entry(key, b"1", first)
    second = await bucket.put(key, b"")
    assert second > first
    assert await bucket.get(key) == Entry(key, b"", second)
    assert Entry(key, b"", second) in await bucket.entries(subjects.TENANT_USAGE)


async def test_only_one_creates_a_key(dial: Connect, ns: str) -> None:
    key = subjects.pin_key(ns, "job", "agent", "uid-t1")
    pins = [await (await dial(name)).bucket(subjects.PINS) for name in ("one", "other")]
    results = await asyncio.gather(*(pin.create(key, b"x") for pin in pins for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, RevisionConflict) for result in results) == 9


async def test_an_update_needs_the_revision_it_saw(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.POLICY)
    key = subjects.policy_key(ns, "job", "agent")
    first = await bucket.create(key, b"1")
    second = await bucket.update(key, b"2", first)
    with pytest.raises(RevisionConflict):
        await bucket.update(key, b"3", first)
    assert await bucket.get(key) == Entry(key, b"2", second)


async def test_a_key_is_deleted_only_at_the_revision_that_was_named(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    key = subjects.job_key(ns, "job")
    first = await bucket.create(key, b"1")
    second = await bucket.put(key, b"2")
    with pytest.raises(RevisionConflict):
        await bucket.delete(key, first)
    assert await bucket.get(key) == Entry(key, b"2", second)
    await bucket.delete(key, second)
    await bucket.delete(subjects.job_key(ns, "never-was"), 0)
    assert await bucket.get(key) is None


async def test_a_deleted_key_is_absent_and_can_be_created_again(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    key = subjects.job_key(ns, "job")
    first = await bucket.create(key, b"1")
    await bucket.delete(key)
    await bucket.delete(subjects.job_key(ns, "never-was"))
    assert await bucket.get(key) is None
    assert await bucket.entries(f"{ns}.") == []
    with pytest.raises(RevisionConflict):
        await bucket.update(key, b"2", first)
    second = await bucket.create(key, b"2")
    assert await bucket.get(key) == Entry(key, b"2", second)


async def test_the_leader_returns_values_delete_markers_and_nothing_for_unknown_keys(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    key = subjects.job_key(ns, "job")
    assert await bucket.get_from_leader(key) is None
    revision = await bucket.put(key, b"\x00value")
    assert await bucket.get_from_leader(key) == Entry(key, b"\x00value", revision)
    await bucket.delete(key)
    marker = await bucket.get_from_leader(key)
    assert marker is not None
    assert marker.data is None
    assert marker.revision > revision


async def test_the_leader_returns_the_marker_of_an_expired_key(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(BRIEF.name)
    async with bucket.watch(f"{ns}.") as entries:
        await bucket.put(f"{ns}.a", b"1")
        assert await take(entries, 2) == [(f"{ns}.a", b"1"), (f"{ns}.a", None)]
    marker = await bucket.get_from_leader(f"{ns}.a")
    assert marker is None or marker.data is None


async def test_entries_are_the_newest_of_each_key_below_a_prefix(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.POLICY)
    for number in range(12):
        await bucket.put(f"{ns}.job.agent", b"%d" % number)
    await bucket.put(f"{ns}.job.other", b"x")
    await bucket.put(f"{ns}.job-2.agent", b"y")
    found = {entry.key: entry.data for entry in await bucket.entries(f"{ns}.job.")}
    assert found == {f"{ns}.job.agent": b"11", f"{ns}.job.other": b"x"}
    assert len(await bucket.entries(f"{ns}.")) == 3
    assert {f"{ns}.job-2.agent", f"{ns}.job.agent"} <= {entry.key for entry in await bucket.entries()}


@pytest.mark.parametrize("key", ["", ".a", "a.", "a..b", "a b", "a.*", "a.>", "é"])
async def test_what_is_not_a_key_is_refused(bus: Bus, key: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    with pytest.raises(BusRefused, match="not a key"):
        await bucket.put(key, b"1")
    with pytest.raises(BusRefused, match="not a key"):
        await bucket.get(key)


@pytest.mark.parametrize("prefix", ["team", ".", "a..", "*."])
async def test_a_prefix_is_made_of_whole_tokens(bus: Bus, prefix: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    with pytest.raises(BusRefused, match="not a prefix"):
        await bucket.entries(prefix)


async def test_a_key_that_is_not_renewed_vanishes_and_watchers_hear_of_it(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(BRIEF.name)
    async with bucket.watch(f"{ns}.") as entries:
        await bucket.put(f"{ns}.a", b"1")
        assert await take(entries, 2) == [(f"{ns}.a", b"1"), (f"{ns}.a", None)]
        assert await bucket.get(f"{ns}.a") is None
        assert await bucket.entries(f"{ns}.") == []
        await bucket.create(f"{ns}.a", b"2")
        assert await take(entries, 1) == [(f"{ns}.a", b"2")]


async def test_a_watch_tells_what_is_there_and_then_what_changes(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    await bucket.put(f"{ns}.gone", b"x")
    await bucket.delete(f"{ns}.gone")
    await bucket.put(f"{ns}.a", b"old")
    revision = await bucket.put(f"{ns}.a", b"1")
    async with bucket.watch(f"{ns}.") as entries:
        assert await soon(anext(entries)) == Entry(f"{ns}.a", b"1", revision)
        await bucket.put(f"{ns}.b", b"2")
        await bucket.put(f"elsewhere-{ns}.b", b"3")
        await bucket.delete(f"{ns}.a")
        assert await take(entries, 2) == [(f"{ns}.b", b"2"), (f"{ns}.a", None)]


async def test_a_cancelled_wait_of_a_watch_loses_nothing(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    async with bucket.watch(f"{ns}.") as entries:
        for number in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(entries), 0.01)
            await bucket.put(f"{ns}.a", b"%d" % number)
            assert await take(entries, 1) == [(f"{ns}.a", b"%d" % number)]


async def test_a_watch_of_everything_sees_every_key(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.LEDGER)
    async with bucket.watch() as entries:
        await bucket.put(f"{ns}.a", b"1")
        while (await soon(anext(entries))).key != f"{ns}.a":
            pass
