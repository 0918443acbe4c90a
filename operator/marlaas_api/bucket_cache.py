"""In-memory cache of a bucket's messages by key, for the operator and the worker roles.

A watch delivers changes at once, and a periodic re-read finds those that the watch missed. Any replica of the bus may
answer a re-read, and may lag. So there is one rule for all buckets: a value or a delete marker counts if its revision is
newer than the cached one. A key that is missing from a re-read, or has an older revision, counts only if the
stream's leader confirms it (`Bucket.get_from_leader`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from marlaas_api.bus import Bucket, Entry
from marlaas_api.errors import MarlaasError, Unreadable
from marlaas_api.messages import BusMessage
from marlaas_api.wire import decode_as

REREAD_S = 3.0
# A delete marker stays cached for this long, so that a late read of a lagging replica cannot restore the key.
TOMBSTONE_S = 60.0
MAX_CONFIRMATIONS = 32
_RETRY_S = 0.5
_log = logging.getLogger(__name__)

M = TypeVar("M", bound=BusMessage)


@dataclass(frozen=True, slots=True)
class Cached(Generic[M]):
    """Cached state of a key.

    Attributes:
        entry: its data is None if the key is deleted, and empty if the message was parsed: the message is kept once.
        message: the parsed data. If this process cannot parse them, the last value of the key that it could; None if there
            was none, or the key is deleted.
        at: arrival time on the event loop's clock, in seconds.
        error: why this process cannot parse the data; empty if it can.
    """

    entry: Entry
    message: M | None
    at: float
    error: str = ""

    @property
    def present(self) -> bool:
        """Whether the key holds a value, readable or not."""
        return self.entry.data is not None


class BucketCache(Generic[M]):
    """Cache of the keys of a bucket that start with `prefix`. Lookups do no I/O.

    Attributes:
        synced: set once the whole bucket was read; before that, a missing key is unknown, not absent.
        read_at: when the whole bucket was last read, on the event loop's clock, in seconds; None: never yet.

    Args:
        open_bucket: returns the bucket; called once, and again after an error.
        kind: type of the bucket's messages.
        changed: called with the key after each change of its cached state.
        relevant: returns the part of a message whose changes `changed` is called for; None: all of it. It receives None for a
            key that is absent or unreadable.
        reread_s: interval of the re-reads; None: `REREAD_S`.
    """

    def __init__(  # noqa: PLR0913 (the last three are keyword-only)
        self,
        open_bucket: Callable[[], Awaitable[Bucket]],
        kind: type[M],
        changed: Callable[[str], None],
        *,
        relevant: Callable[[M | None], Hashable] | None = None,
        prefix: str = "",
        reread_s: float | None = None,
    ) -> None:
        self._open_bucket = open_bucket
        self._kind = kind
        self._changed = changed
        self._relevant = relevant
        self._prefix = prefix
        self._reread_s = reread_s
        self._cached: dict[str, Cached[M]] = {}
        self._bucket: Bucket | None = None
        self.synced = asyncio.Event()
        self.read_at: float | None = None

    def get(self, key: str) -> M | None:
        """Return the cached message of a key, which may lag behind the bus; None if absent.

        If the key's value is unreadable, return its last readable one, so that no decision takes the key for absent; None if
        this process has read none. Before a compare-and-set, see `unreadable`.
        """
        cached = self._cached.get(key)
        return None if cached is None else cached.message

    def entry(self, key: str) -> Entry | None:
        """Return the cached entry of a key, for a compare-and-set; that of a deleted key has no data. None: unknown key."""
        cached = self._cached.get(key)
        return None if cached is None else cached.entry

    def unreadable(self, key: str) -> str:
        """Return why this process cannot parse the key's value, such as a newer release's message; empty if it can, or the key is absent."""
        cached = self._cached.get(key)
        return "" if cached is None else cached.error

    def present(self) -> list[str]:
        """Return the present keys, whether or not their values are readable."""
        return [key for key, cached in self._cached.items() if cached.present]

    def items(self) -> Iterator[tuple[str, M, float]]:
        """Yield key, message and arrival time (seconds of the event loop's clock) of every present key, as `get`."""
        for key, cached in list(self._cached.items()):
            if cached.message is not None:
                yield key, cached.message, cached.at

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield key and entry of every cached key; the entries of deleted keys have no data."""
        for key, cached in list(self._cached.items()):
            yield key, cached.entry

    async def read(self, key: str) -> M | None:
        """Read a key's current message from the stream's leader, and update the cache. Raises BusUnavailable."""
        before = self._cached.get(key)
        entry = await (await self._open()).get_from_leader(key)
        self._replace(key, before, entry)
        return self.get(key)

    def note(self, entry: Entry) -> None:
        """Store an entry if it is newer than the cached one: from the watch, or written by this process."""
        cached = self._cached.get(entry.key)
        if cached is None or entry.revision > cached.entry.revision:
            self._store(entry)

    async def follow(self) -> None:
        """Keep the cache up to date until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name=f"watch {self._kind.__name__}")
            group.create_task(self._reread(), name=f"re-read {self._kind.__name__}")

    async def refresh(self) -> None:
        """Read the whole bucket once. Raises BusUnavailable, BusRefused."""
        bucket = await self._open()
        before = dict(self._cached)
        found: dict[str, int] = {}
        async for page in bucket.pages(self._prefix):
            for entry in page:
                self.note(entry)
                found.pop(entry.key, None)
                if entry.data is not None:
                    found[entry.key] = entry.revision
        self._drop_tombstones(found)
        doubtful = [key for key, cached in before.items() if _is_doubtful(cached, found.get(key))]
        await self._confirm(bucket, before, doubtful)
        self.read_at = asyncio.get_running_loop().time()
        self.synced.set()

    async def _confirm(self, bucket: Bucket, before: dict[str, Cached[M]], keys: Iterable[str]) -> None:
        """Ask the stream's leader for these keys, and cache its answers."""
        limit = asyncio.Semaphore(MAX_CONFIRMATIONS)

        async def confirm(key: str) -> None:
            async with limit:
                self._replace(key, before[key], await bucket.get_from_leader(key))

        results = await asyncio.gather(*map(confirm, keys), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _watch(self) -> None:
        while True:
            try:
                async with (await self._open()).watch(self._prefix) as entries:
                    async for entry in entries:
                        self.note(entry)
            except MarlaasError as error:
                _log.warning("watch of %s keys interrupted: %s", self._kind.__name__, error)
            await asyncio.sleep(_RETRY_S)

    async def _reread(self) -> None:
        while True:
            try:
                await self.refresh()
            except MarlaasError as error:
                _log.warning("re-read of %s keys failed: %s", self._kind.__name__, error)
                await asyncio.sleep(_RETRY_S)
            else:
                await asyncio.sleep(self._reread_s or REREAD_S)

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._open_bucket()
        return self._bucket

    def _replace(self, key: str, before: Cached[M] | None, entry: Entry | None) -> None:
        """Cache the leader's answer, even if it is older, unless the cached state has changed since `before`."""
        if self._cached.get(key) is not before:
            if entry is not None:
                self.note(entry)
        elif entry is None:
            if self._cached.pop(key, None) is not None:
                self._notify(key, before, None)
        elif before is None or (entry.revision, entry.data is None) != (before.entry.revision, not before.present):
            self._store(entry)

    def _store(self, entry: Entry) -> None:
        before = self._cached.get(entry.key)
        message, error = self._parse(entry, before)
        kept = entry if error or entry.data is None else Entry(entry.key, b"", entry.revision)
        self._cached[entry.key] = Cached(kept, message, asyncio.get_running_loop().time(), error)
        if entry.data is not None or (before is not None and before.present):
            self._notify(entry.key, before, message)

    def _notify(self, key: str, before: Cached[M] | None, message: M | None) -> None:
        """Call `changed` if the relevant part of a key's message has changed."""
        old = None if before is None else before.message
        if self._relevant is None or self._relevant(old) != self._relevant(message):
            self._changed(key)

    def _drop_tombstones(self, found: Iterable[str]) -> None:
        oldest = asyncio.get_running_loop().time() - TOMBSTONE_S
        gone = [key for key, cached in self._cached.items() if not cached.present and cached.at < oldest]
        for key in set(gone).difference(found):
            del self._cached[key]

    def _parse(self, entry: Entry, before: Cached[M] | None) -> tuple[M | None, str]:
        """Return the message to cache, and why the entry's own cannot be parsed."""
        if entry.data is None:
            return None, ""
        try:
            return decode_as(self._kind, entry.data, f"the {self._kind.__name__} of key {entry.key}"), ""
        except Unreadable as error:
            is_logged = before is not None and before.error
            _log.log(logging.DEBUG if is_logged else logging.ERROR, "%s", error)
            return None if before is None else before.message, str(error)


def _is_doubtful(cached: Cached[M], found: int | None) -> bool:
    """Return whether a re-read, which found a revision of the key, contradicts the cached state without a newer one."""
    return cached.present if found is None else found < cached.entry.revision
