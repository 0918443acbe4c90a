import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable, Iterable

import pytest

from marlaas_api import bucket_cache, subjects, wire
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import Bucket, BusUnavailable, Entry
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.messages import Pin
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy


class CacheHarness:
    """A cache of the keys `a.` of the bucket `pins`, on a server that a test may change."""

    def __init__(self, relevant: Callable[[Pin | None], Hashable] | None = None) -> None:
        self.server = MemoryServer(virtual_time.now)
        self.bus = self.server.connect("test")
        self.changes: list[str] = []
        self.changed = asyncio.Event()
        pins = lambda: self.bus.bucket(subjects.PINS)  # noqa: E731
        self.cache = BucketCache(pins, Pin, self._note, prefix="a.", relevant=relevant)

    def _note(self, key: str) -> None:
        self.changes.append(key)
        self.changed.set()

    async def bucket(self, **versions: int) -> Bucket:
        """The bucket, with these versions of the keys `a.NAME`, and the cache that has read it."""
        await self.bus.ensure()
        bucket = await self.bus.bucket(subjects.PINS)
        for name, version in versions.items():
            await bucket.put(f"a.{name}", pin(version))
        await self.cache.refresh()
        return bucket

    def cached(self) -> dict[str, int]:
        return {key: found.version for key, found, _ in self.cache.items()}

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

        async def lagging(prefix: str = "") -> AsyncIterator[list[Entry]]:
            yield [entry for entry in found if entry.key.startswith(prefix)]

        monkeypatch.setattr(await self.cache._open(), "pages", lagging)


def pin(version: int) -> bytes:
    return wire.encode(Pin(version=version))


async def test_present_keys_and_changes_below_the_prefix_are_cached_also_those_that_the_watch_missed():
    harness = CacheHarness()
    bucket = await harness.bucket(x=1, y=1)
    await bucket.put("b.x", pin(1))
    await bucket.delete("a.x")
    await bucket.put("a.y", pin(2))
    await harness.cache.refresh()
    assert harness.cached() == {"a.y": 2}
    assert harness.changes == ["a.x", "a.y", "a.x", "a.y"]
    async with harness.following():
        await bucket.put("a.x", pin(3))
        await harness.until("a.x", 3)
        await bucket.delete("a.x")
        await harness.until("a.x", None)


async def test_changed_is_called_only_for_changes_of_the_relevant_part():
    harness = CacheHarness(relevant=lambda pin: None if pin is None else pin.version // 10)
    bucket = await harness.bucket()
    for version in (1, 2, 12, 13):
        await bucket.put("a.x", pin(version))
        await harness.cache.refresh()
        assert harness.cached() == {"a.x": version}
    assert harness.changes == ["a.x"] * 2, "0 and 1"
    await bucket.put("a.x", b"no pin")
    await harness.cache.refresh()
    await bucket.delete("a.x")
    await harness.cache.refresh()
    assert harness.changes == ["a.x"] * 3, "unreadable and absent are the same"
    await bucket.put("a.x", pin(1))
    await harness.cache.refresh()
    harness.cache._replace("a.x", harness.cache._cached["a.x"], None)
    assert harness.changes == ["a.x"] * 5, "a key that the leader has no more is a relevant change"


async def test_a_key_that_a_replica_does_not_return_stays_until_the_leader_confirms(monkeypatch):
    harness = CacheHarness()
    bucket = await harness.bucket(x=1)
    await harness.replica_reads(monkeypatch, [])
    for _ in range(3):
        await harness.cache.refresh()
        assert harness.cached() == {"a.x": 1}
    await bucket.delete("a.x")
    await harness.cache.refresh()
    assert harness.cached() == {}
    assert harness.changes == ["a.x", "a.x"]
    await bucket.put("a.x", pin(3))
    assert await harness.cache.read("a.x") == Pin(version=3) == harness.cache.get("a.x"), "from the leader"


async def test_neither_an_older_value_nor_a_deleted_key_comes_back_from_a_replica_that_lags(monkeypatch):
    harness = CacheHarness()
    bucket = await harness.bucket(x=1, gone=1)
    old = await bucket.entries("a.")
    await bucket.put("a.x", pin(2))
    async with harness.following():
        await harness.until("a.x", 2)
        await bucket.delete("a.gone")
        await harness.until("a.gone", None)
    changes = list(harness.changes)
    await harness.replica_reads(monkeypatch, old)
    await harness.cache.refresh()
    assert harness.cached() == {"a.x": 2}
    assert harness.changes == changes, "not for a moment"


async def test_a_bus_that_was_emptied_and_counts_revisions_anew_is_cached_as_it_is():
    harness = CacheHarness()
    bucket = await harness.bucket(x=0, y=0)
    for version in range(4):
        await bucket.put("a.y", pin(version))
    await harness.cache.refresh()
    harness.server.streams.clear()
    await harness.bucket(y=7)
    assert harness.cached() == {"a.y": 7}


async def test_delete_markers_are_dropped_after_a_while():
    harness = CacheHarness()
    bucket = await harness.bucket(x=1)
    await bucket.delete("a.x")
    for pause_s, is_kept in ((0.0, True), (bucket_cache.TOMBSTONE_S - 1, True), (2.0, False)):
        await asyncio.sleep(pause_s)
        await harness.cache.refresh()
        assert (harness.cache.entry("a.x") is not None) == is_kept


async def test_an_outage_keeps_the_cache_and_ends_in_the_current_state():
    harness = CacheHarness()
    assert harness.cache.read_at is None, "a missing key is unknown until the first whole read"
    bucket = await harness.bucket(x=1)
    read_at = harness.cache.read_at
    assert read_at is not None
    harness.server.available = False
    with pytest.raises(BusUnavailable):
        await harness.cache.refresh()
    assert (harness.cached(), harness.cache.read_at) == ({"a.x": 1}, read_at)
    async with harness.following():
        await asyncio.sleep(60)
        harness.server.available = True
        await bucket.put("a.x", pin(2))
        await harness.until("a.x", 2)


async def test_an_unreadable_value_is_present_with_the_last_readable_message():
    harness = CacheHarness()
    bucket = await harness.bucket()
    for data, version, readable in ((b"\xff", None, False), (pin(2), 2, True), (b"\xff", 2, False)):
        await bucket.put("a.x", data)
        await harness.cache.refresh()
        assert harness.cache.get("a.x") == (None if version is None else Pin(version=version))
        assert ("Pin of key a.x cannot be read" in harness.cache.unreadable("a.x")) is not readable
        assert harness.cache.present() == ["a.x"]
