"""Keys: who writes them, and who hears of it."""

import asyncio

import pytest
from tests.api.bus_contract.conftest import BRIEF, soon, take

from marlaas_api import subjects
from marlaas_api.bus import BusRefused, Entry, RevisionConflict


async def test_a_key_is_written_overwritten_deleted_and_created_again(bus, ns):
    bucket, key, never = await bus.bucket(subjects.JOBS), subjects.job_key(ns, "job"), subjects.job_key(ns, "never-was")
    assert await bucket.get(key) is await bucket.get_from_leader(key) is None
    first = await bucket.put(key, b"\x00value")
    assert await bucket.get(key) == await bucket.get_from_leader(key) == Entry(key, b"\x00value", first)
    second = await bucket.put(key, b"")
    assert second > first
    assert await bucket.get(key) == Entry(key, b"", second)
    await bucket.delete(key)
    await bucket.delete(never)
    assert await bucket.get(key) is None
    assert await bucket.entries(f"{ns}.") == []
    marker = await bucket.get_from_leader(key)
    assert marker.data is None
    assert marker.revision > second
    third = await bucket.create(key, b"3")
    assert await bucket.get(key) == Entry(key, b"3", third)


async def test_an_update_and_a_deletion_need_the_revision_they_saw(bus, ns):
    bucket, key = await bus.bucket(subjects.POLICY), subjects.policy_key(ns, "job", "agent")
    first = await bucket.create(key, b"1")
    second = await bucket.update(key, b"2", first)
    for late in (bucket.update(key, b"3", first), bucket.delete(key, first)):
        with pytest.raises(RevisionConflict):
            await late
    assert await bucket.get(key) == Entry(key, b"2", second)
    await bucket.delete(key, second)
    await bucket.delete(subjects.policy_key(ns, "job", "never-was"), 0)
    assert await bucket.get(key) is None
    with pytest.raises(RevisionConflict):
        await bucket.update(key, b"3", second)


async def test_entries_are_the_newest_of_each_key_below_a_prefix(bus, ns):
    bucket = await bus.bucket(subjects.POLICY)
    for number in range(12):
        await bucket.put(f"{ns}.job.agent", b"%d" % number)
    await bucket.put(f"{ns}.job.other", b"x")
    await bucket.put(f"{ns}.job-2.agent", b"y")
    found = {entry.key: entry.data for entry in await bucket.entries(f"{ns}.job.")}
    assert found == {f"{ns}.job.agent": b"11", f"{ns}.job.other": b"x"}
    assert len(await bucket.entries(f"{ns}.")) == 3
    assert {f"{ns}.job-2.agent", f"{ns}.job.agent"} <= {entry.key for entry in await bucket.entries()}


async def test_pages_and_a_watch_give_the_entries_in_parts_that_need_not_fit_in_memory(bus, ns):
    bucket, large = await bus.bucket(subjects.JOBS), bytes(bus.max_payload_bytes - 4096)
    for number in range(5):
        await bucket.put(f"{ns}.{number}", large)
    entries = await bucket.entries(f"{ns}.")
    pages = [page async for page in bucket.pages(f"{ns}.")]
    assert [entry for page in pages for entry in page] == entries
    assert max(sum(len(entry.data or b"") for entry in page) for page in pages) <= 24 << 20
    async with bucket.watch(f"{ns}.") as watched:
        assert [await soon(anext(watched)) for _ in entries] == entries


async def test_what_is_not_a_key_or_no_prefix_of_whole_tokens_is_refused(bus):
    bucket = await bus.bucket(subjects.JOBS)
    for key in ("", ".a", "a.", "a..b", "a b", "a.*", "a.>", "é"):
        for call in (bucket.put(key, b"1"), bucket.get(key)):
            with pytest.raises(BusRefused, match="not a key"):
                await call
    for prefix in ("team", ".", "a..", "*."):
        with pytest.raises(BusRefused, match="not a prefix"):
            await bucket.entries(prefix)


async def test_a_key_that_is_not_renewed_vanishes_and_watchers_hear_of_it(bus, ns):
    bucket = await bus.bucket(BRIEF.name)
    async with bucket.watch(f"{ns}.") as entries:
        await bucket.put(f"{ns}.a", b"1")
        assert await take(entries, 2) == [(f"{ns}.a", b"1"), (f"{ns}.a", None)]
        marker = await bucket.get_from_leader(f"{ns}.a")
        assert marker is None or marker.data is None
        assert await bucket.get(f"{ns}.a") is None
        assert await bucket.entries(f"{ns}.") == []
        await bucket.create(f"{ns}.a", b"2")
        assert await take(entries, 1) == [(f"{ns}.a", b"2")]


async def test_a_watch_tells_what_is_there_and_then_what_changes(bus, ns):
    bucket = await bus.bucket(subjects.JOBS)
    await bucket.put(f"{ns}.gone", b"x")
    await bucket.delete(f"{ns}.gone")
    await bucket.put(f"{ns}.a", b"old")
    revision = await bucket.put(f"{ns}.a", b"1")
    async with bucket.watch(f"{ns}.") as entries, bucket.watch() as everything:
        assert await soon(anext(entries)) == Entry(f"{ns}.a", b"1", revision)
        await bucket.put(f"{ns}.b", b"2")
        await bucket.put(f"elsewhere-{ns}.b", b"3")
        await bucket.delete(f"{ns}.a")
        assert await take(entries, 2) == [(f"{ns}.b", b"2"), (f"{ns}.a", None)]
        while (await soon(anext(everything))).key != f"elsewhere-{ns}.b":
            pass


async def test_a_cancelled_wait_of_a_watch_loses_nothing(bus, ns):
    bucket = await bus.bucket(subjects.JOBS)
    async with bucket.watch(f"{ns}.") as entries:
        for number in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(entries), 0.01)
            await bucket.put(f"{ns}.a", b"%d" % number)
            assert await take(entries, 1) == [(f"{ns}.a", b"%d" % number)]
