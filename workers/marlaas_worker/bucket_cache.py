"""In-memory copy of a bucket's messages by key: a watch delivers changes at once, and a periodic re-read repairs missed ones."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from marlaas_api import wire
from marlaas_api.bus import Bucket, Bus, BusUnavailable, Entry
from marlaas_api.errors import Permanent
from marlaas_api.messages import BusMessage

REREAD_S = 3.0
_RETRY_S = 0.5
_log = logging.getLogger(__name__)

M = TypeVar("M", bound=BusMessage)


@dataclass(frozen=True, slots=True)
class Seen(Generic[M]):
    """Cached state of a key.

    message: the parsed value; None if the key is deleted or this worker cannot parse it.
    present: whether the key holds a value. at: arrival time on the event loop's clock, in seconds.
    """

    message: M | None
    present: bool
    revision: int
    at: float


class BucketCache(Generic[M]):
    """Cache of a bucket's messages; `changed` is called after each change. Reads do no I/O."""

    def __init__(self, bus: Bus, bucket: str, kind: type[M], changed: Callable[[], None], prefix: str = "") -> None:
        self._bus = bus
        self._name = bucket
        self._kind = kind
        self._changed = changed
        self._prefix = prefix
        self._seen: dict[str, Seen[M]] = {}
        self._bucket: Bucket | None = None

    def get(self, key: str) -> M | None:
        """Return the cached message of a key, which may lag behind the bus; None if absent or unreadable."""
        seen = self._seen.get(key)
        return None if seen is None else seen.message

    def unreadable(self, key: str) -> bool:
        """Return whether the key holds a value that this worker cannot parse, such as a newer release's message."""
        seen = self._seen.get(key)
        return seen is not None and seen.present and seen.message is None

    def items(self) -> Iterator[tuple[str, M, float]]:
        """Yield key, message and time of the last change of every present, readable key."""
        for key, seen in list(self._seen.items()):
            if seen.message is not None:
                yield key, seen.message, seen.at

    async def read(self, key: str) -> M | None:
        """Read a key's current message from the bus, and update the cache. Raises BusUnavailable."""
        entry = await (await self._open()).get(key)
        if entry is None:
            self._forget(key)
        else:
            self._take(entry)
        return self.get(key)

    async def follow(self) -> None:
        """Keep the cache up to date until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name=f"watch {self._name}")
            group.create_task(self._reread(), name=f"re-read {self._name}")

    async def _watch(self) -> None:
        while True:
            try:
                async with (await self._open()).watch(self._prefix) as entries:
                    async for entry in entries:
                        self._take(entry)
            except BusUnavailable as error:
                _log.warning("watching %s was interrupted: %s", self._name, error)
            await asyncio.sleep(_RETRY_S)

    async def _reread(self) -> None:
        while True:
            try:
                await self.refresh()
            except BusUnavailable as error:
                _log.warning("cannot re-read %s: %s", self._name, error)
            await asyncio.sleep(REREAD_S)

    async def refresh(self) -> None:
        """Read all entries of the bucket once. Raises BusUnavailable."""
        bucket = await self._open()
        known = set(self._seen)
        entries = await bucket.entries(self._prefix)
        for entry in entries:
            self._take(entry)
        for key in known.difference(entry.key for entry in entries):
            self._forget(key)

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._bus.bucket(self._name)
        return self._bucket

    def _take(self, entry: Entry) -> None:
        known = self._seen.get(entry.key)
        if known is not None and known.revision >= entry.revision:
            return
        self._seen[entry.key] = Seen(
            self._parse(entry), entry.data is not None, entry.revision, asyncio.get_running_loop().time()
        )
        self._changed()

    def _forget(self, key: str) -> None:
        if self._seen.pop(key, None) is not None:
            self._changed()

    def _parse(self, entry: Entry) -> M | None:
        if entry.data is None:
            return None
        try:
            return wire.decode_as(self._kind, entry.data)
        except Permanent:
            _log.exception("%s of %s cannot be read", entry.key, self._name)
            return None
