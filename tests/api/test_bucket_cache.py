import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable, Iterable

import pytest

from marlaas_api import bucket_cache, subjects, wire
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import Bucket, BusUnavailable, Entry
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.messages import Pin


class CacheHarness:
    """A cache of the keys `a.` of the bucket `pins`, on a server that a test may change."""

    def __init__(self, relevant: Callable[[Pin | None], Hashable] | None = None) -> None:
        self.server = MemoryServer()
        self.bus = self.server.connect("test")
        self.changes: list[str] = []
        self.changed = asyncio.Event()
        self.cache = BucketCache(
            lambda: self.bus.bucket(subjects.PINS), Pin, self._note, prefix="a.", relevant=relevant
        )

    def _note(self, key: str) -> None:
        self.changes.append(key)
        self.changed.set()

    async def bucket(self) -> Bucket:
        await self.bus.ensure()
        return await self.bus.bucket(subjects.PINS)

    async def until(self, key: str, version: int | None) -> None:
        async with asyncio.timeout(10):
            while self.cache.get(key) != (None if version is None else Pin(version=version)):
                self.changed.clear()
                await self.changed.wait()

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self.cache.follow())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def replica_reads(self, monkeypatch: pytest.MonkeyPatch, entries: Iterable[Entry]) -> None:
        """Have the cache's re-reads answered by a replica that lags; the leader answers as before."""
        found = list(entries)

        async def lagging(prefix: str = "") -> list[Entry]:
            return [entry for entry in found if entry.key.startswith(prefix)]

        monkeypatch.setattr(await self.cache._open(), "entries", lagging)


def pin(version: int) -> bytes:
    return wire.encode(Pin(version=version))


async def test_present_keys_and_changes_are_cached() -> None:
    harness = CacheHarness()
    bucket = await harness.bucket()
    await bucket.put("a.x", pin(1))
    async with harness.following():
        await harness.until("a.x", 1)
        await bucket.put("a.x", pin(2))
        await harness.until("a.x", 2)
        await bucket.delete("a.x")
        await harness.until("a.x", None)


async def test_changed_is_called_only_for_changes_of_the_relevant_part() -> None:
    harness = CacheHarness(relevant=lambda pin: None if pin is None else pin.version // 10)
    bucket = await harness.bucket()
    for version in (1, 2, 12, 13):
        await bucket.put("a.x", pin(version))
        await harness.cache.refresh()
        assert harness.cache.get("a.x") == Pin(version=version)
    assert harness.changes == ["a.x"] * 2, "0 and 1"
    await bucket.put("a.x", b"no pin")
    await harness.cache.refresh()
    await bucket.delete("a.x")
    await harness.cache.refresh()
    assert harness.changes == ["a.x"] * 3, "unreadable and absent are the same"


async def test_a_key_that_the_leader_has_no_more_is_a_relevant_change() -> None:
    harness = CacheHarness(relevant=lambda pin: pin is not None)
    bucket = await harness.bucket()
    await bucket.put("a.x", pin(1))
    await harness.cache.refresh()
    harness.cache._replace("a.x", harness.cache._cached["a.x"], None)
    assert harness.changes == ["a.x"] * 2


async def test_keys_with_another_prefix_are_not_cached() -> None:
    harness = CacheHarness()
    bucket = await harness.bucket()
    await bucket.put("b.x", pin(1))
    await bucket.put("a.x", pin(1))
    async with harness.following():
        await harness.until("a.x", 1)
    assert [key for key, _, _ in harness.cache.items()] == ["a.x"]


async def test_a_re_read_finds_changes_that_the_watch_missed() -> None:
    harness = CacheHarness()
    bucket = await harness.bucket()
    await bucket.put("a.x", pin(1))
    await bucket.put("a.y", pin(1))
    await harness.cache.refresh()
    await bucket.delete("a.x")
    await bucket.put("a.y", pin(2))
    await harness.cache.refresh()
    assert {key: found.version for key, found, _ in harness.cache.items()} == {"a.y": 2}
    assert harness.changes == ["a.x", "a.y", "a.y", "a.x"]


async def test_a_key_that_a_replica_does_not_return_stays_until_the_leader_confirms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = CacheHarness()
    bucket = await harness.bucket()
    await bucket.put("a.x", pin(1))
    await harness.cache.refresh()
    await harness.replica_reads(monkeypatch, [])
    for _ in range(3):
        await harness.cache.refresh()
        assert harness.cache.get("a.x") == Pin(version=1)
    await bucket.delete("a.x")
    await harness.cache.refresh()
    assert harness.cache.get("a.x") is None
    assert harness.changes == ["a.x", "a.x"]


async def test_an_older_value_of_a_replica_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = CacheHarness()
    bucket = await harness.bucket()
    await bucket.put("a.x", pin(1))
    old = await bucket.entries("a.")
    await bucket.put("a.x", pin(2))
    await harness.cache.refresh()
    await harness.replica_reads(monkeypatch, old)
    await harness.cache.refresh()
    assert harness.cache.get("a.x") == Pin(version=2)


async def test_a_deleted_key_does_not_come_back_from_a_replica_that_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = CacheHarness()
    bucket = await harness.bucket()
    await bucket.put("a.x", pin(1))
    old = await bucket.entries("a.")
    async with harness.following():
        await harness.until("a.x", 1)
        await bucket.delete("a.x")
        await harness.until("a.x", None)
    await harness.replica_reads(monkeypatch, old)
    await harness.cache.refresh()
    assert harness.cache.get("a.x") is None


async def test_a_bus_that_was_emptied_and_counts_revisions_anew_is_cached_as_it_is() -> None:
    harness = CacheHarness()
    bucket = await harness.bucket()
    for version in range(5):
        await bucket.put("a.x", pin(version))
        await bucket.put("a.y", pin(version))
    await harness.cache.refresh()
    harness.server.streams.clear()
    bucket = await harness.bucket()
    await bucket.put("a.y", pin(7))
    await harness.cache.refresh()
    assert {key: found.version for key, found, _ in harness.cache.items()} == {"a.y": 7}


async def test_delete_markers_are_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = CacheHarness()
    bucket = await harness.bucket()
    await bucket.put("a.x", pin(1))
    await harness.cache.refresh()
    await bucket.delete("a.x")
    await harness.cache.refresh()
    assert harness.cache.entry("a.x") is not None
    monkeypatch.setattr(bucket_cache, "TOMBSTONE_S", 0.0)
    await harness.cache.refresh()
    assert harness.cache.entry("a.x") is None


async def test_reading_one_key_asks_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = CacheHarness()
    bucket = await harness.bucket()
    assert await harness.cache.read("a.x") is None
    await harness.replica_reads(monkeypatch, [])
    await bucket.put("a.x", pin(3))
    assert await harness.cache.read("a.x") == Pin(version=3) == harness.cache.get("a.x")
    await bucket.delete("a.x")
    assert await harness.cache.read("a.x") is None


async def test_an_outage_keeps_the_cache_and_ends_in_the_current_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_cache, "REREAD_S", 0.02)
    harness = CacheHarness()
    bucket = await harness.bucket()
    await bucket.put("a.x", pin(1))
    async with harness.following():
        await harness.until("a.x", 1)
        harness.server.available = False
        with pytest.raises(BusUnavailable):
            await harness.cache.refresh()
        assert harness.cache.get("a.x") == Pin(version=1)
        harness.server.available = True
        await bucket.put("a.x", pin(2))
        await harness.until("a.x", 2)


async def test_an_unreadable_value_is_present_but_has_no_message() -> None:
    harness = CacheHarness()
    bucket = await harness.bucket()
    await bucket.put("a.x", b"\xff")
    await harness.cache.refresh()
    assert harness.cache.get("a.x") is None
    assert harness.cache.unreadable("a.x")
    assert harness.cache.present() == ["a.x"]
    await bucket.put("a.x", pin(2))
    await harness.cache.refresh()
    assert harness.cache.get("a.x") == Pin(version=2)
    assert not harness.cache.unreadable("a.x")


async def test_a_missing_key_is_unknown_until_the_first_whole_read() -> None:
    harness = CacheHarness()
    await harness.bucket()
    assert harness.cache.read_at is None
    await harness.cache.refresh()
    first = harness.cache.read_at
    assert first is not None
    harness.server.available = False
    with pytest.raises(BusUnavailable):
        await harness.cache.refresh()
    assert harness.cache.read_at == first
