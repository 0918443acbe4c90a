import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from marlaas_api import subjects, wire
from marlaas_api.bus import Bucket, BusUnavailable
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.messages import Pin
from marlaas_worker import bucket_cache
from marlaas_worker.bucket_cache import BucketCache


class Watched:
    """A mirror of `pins`, and the bucket that it shows."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.bus = self.server.connect("test")
        self.changed = asyncio.Event()
        self.mirror = BucketCache(self.bus, subjects.PINS, Pin, self.changed.set, "a.")

    async def bucket(self) -> Bucket:
        await self.bus.ensure()
        return await self.bus.bucket(subjects.PINS)

    async def until(self, key: str, version: int | None) -> None:
        while self.mirror.get(key) != (None if version is None else Pin(version=version)):
            self.changed.clear()
            await self.changed.wait()

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self.mirror.follow())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def pin(version: int) -> bytes:
    return wire.encode(Pin(version=version))


async def test_what_is_there_and_what_changes_is_seen() -> None:
    watched = Watched()
    bucket = await watched.bucket()
    await bucket.put("a.x", pin(1))
    async with watched.following():
        await watched.until("a.x", 1)
        await bucket.put("a.x", pin(2))
        await watched.until("a.x", 2)
        await bucket.delete("a.x")
        await watched.until("a.x", None)


async def test_other_prefixes_are_not_seen() -> None:
    watched = Watched()
    bucket = await watched.bucket()
    await bucket.put("b.x", pin(1))
    await bucket.put("a.x", pin(1))
    async with watched.following():
        await watched.until("a.x", 1)
    assert [key for key, _, _ in watched.mirror.items()] == ["a.x"]


async def test_re_reading_finds_what_a_watch_has_missed() -> None:
    watched = Watched()
    bucket = await watched.bucket()
    await bucket.put("a.x", pin(1))
    await bucket.put("a.y", pin(1))
    await watched.mirror.refresh()
    await bucket.delete("a.x")
    await bucket.put("a.y", pin(2))
    await watched.mirror.refresh()
    assert {key: found.version for key, found, _ in watched.mirror.items()} == {"a.y": 2}


async def test_reading_one_key_brings_it_up_to_date() -> None:
    watched = Watched()
    bucket = await watched.bucket()
    assert await watched.mirror.read("a.x") is None
    await bucket.put("a.x", pin(3))
    assert await watched.mirror.read("a.x") == Pin(version=3) == watched.mirror.get("a.x")
    await bucket.delete("a.x")
    assert await watched.mirror.read("a.x") is None


async def test_it_lives_through_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_cache, "REREAD_S", 0.02)
    watched = Watched()
    bucket = await watched.bucket()
    await bucket.put("a.x", pin(1))
    async with watched.following():
        await watched.until("a.x", 1)
        watched.server.available = False
        with pytest.raises(BusUnavailable):
            await watched.mirror.refresh()
        watched.server.available = True
        await bucket.put("a.x", pin(2))
        await watched.until("a.x", 2)


async def test_what_cannot_be_read_counts_as_absent() -> None:
    watched = Watched()
    bucket = await watched.bucket()
    await bucket.put("a.x", b"\xff")
    await watched.mirror.refresh()
    assert watched.mirror.get("a.x") is None
    await bucket.put("a.x", pin(2))
    await watched.mirror.refresh()
    assert watched.mirror.get("a.x") == Pin(version=2)
