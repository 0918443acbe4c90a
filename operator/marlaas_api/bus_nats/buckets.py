"""Key-value buckets over JetStream in the layout that all NATS clients use (ADR-8), and their watches.

Every write has a message id, of its own unless the caller gives one, so that it can be retried after a broken connection
without happening twice.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from marlaas_api import subjects
from marlaas_api.bus import Entry, RevisionConflict, checked_key, checked_prefix
from marlaas_api.bus_nats.jetstream import JetStream, sequence
from marlaas_api.bus_nats.layout import bucket_stream, bucket_subject
from marlaas_api.bus_nats.link import Link
from marlaas_api.bus_nats.routes import Incoming
from marlaas_api.bus_nats.watches import BucketWatch, StreamReader

_REMOVALS = ("DEL", "PURGE")
# Lifetime of a removal marker. A watcher that was disconnected for longer reads the whole bucket again and does not need it.
_MARKER_TTL = "1h"


class NatsBucket:
    """A key-value bucket."""

    def __init__(self, jetstream: JetStream, link: Link, name: str) -> None:
        self._jetstream = jetstream
        self._link = link
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def get(self, key: str) -> Entry | None:
        entry = await self._read(key)
        return entry if entry is not None and entry.data is not None else None

    async def get_from_leader(self, key: str) -> Entry | None:
        message = await self._jetstream.last_at_leader(bucket_stream(self._name), self._subject(key))
        return None if message is None else self._entry(message.subject, message.sequence, message)

    async def put(self, key: str, data: bytes) -> int:
        return await self._write(key, data, {})

    async def create(self, key: str, data: bytes, *, message_id: str | None = None) -> int:
        message_id = message_id or _new_id()
        try:
            return await self.update(key, data, 0, message_id=message_id)
        except RevisionConflict:
            entry = await self._read(key)
            if entry is not None and entry.data is not None:
                raise
            return await self.update(key, data, entry.revision if entry is not None else 0, message_id=message_id)

    async def update(self, key: str, data: bytes, revision: int, *, message_id: str | None = None) -> int:
        return await self._write(key, data, {"Nats-Expected-Last-Subject-Sequence": str(revision)}, message_id)

    async def delete(self, key: str, revision: int | None = None, *, message_id: str | None = None) -> None:
        at = {} if revision is None else {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        removal = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", "Nats-TTL": _MARKER_TTL}
        if self._name in subjects.ROLLUP_FREE:  # it keeps one message a key, so a marker replaces the value as well
            removal = {"KV-Operation": "DEL", "Nats-TTL": _MARKER_TTL}
        await self._write(key, b"", {**removal, **at}, message_id)

    async def entries(self, prefix: str = "") -> list[Entry]:
        newest: dict[str, Entry] = {}
        async for page in self.pages(prefix):
            for entry in page:
                newest.pop(entry.key, None)
                newest[entry.key] = entry
        return [entry for entry in newest.values() if entry.data is not None]

    async def pages(self, prefix: str = "") -> AsyncIterator[list[Entry]]:
        start = 1
        while page := await self._page(prefix, start):
            yield page
            start = page[-1].revision + 1

    @asynccontextmanager
    async def watch(self, prefix: str = "") -> AsyncIterator[AsyncIterator[Entry]]:
        tail = StreamReader(self._jetstream, self._link, bucket_stream(self._name), self._filter(prefix))
        watch = BucketWatch(tail, lambda start: self._page(prefix, start), self._entry)
        try:
            yield watch
        finally:
            await watch.stop()

    async def _read(self, key: str) -> Entry | None:
        message = await self._jetstream.last(bucket_stream(self._name), self._subject(key))
        return None if message is None else self._entry(self._subject(key), sequence(message), message)

    async def _write(self, key: str, data: bytes, headers: dict[str, str], message_id: str | None = None) -> int:
        named = {"Nats-Msg-Id": message_id or _new_id(), **headers}
        return await self._jetstream.publish(self._subject(key), data, named)

    async def _page(self, prefix: str, start: int) -> list[Entry]:
        """Return the next entries from a revision on, deletions included, oldest change first; none: all are read.

        A newer entry of a key can replace an older one during the read. The read therefore goes on until no entry
        follows, so that no key is missed.
        """
        messages, _ = await self._jetstream.page(bucket_stream(self._name), self._filter(prefix), start)
        return [self._entry((one.headers or {})["Nats-Subject"], sequence(one), one) for one in messages]

    def _entry(self, subject: str, revision: int, message: Incoming) -> Entry:
        headers = message.headers or {}
        removed = headers.get("KV-Operation") in _REMOVALS or "Nats-Marker-Reason" in headers
        key = subject.removeprefix(bucket_subject(self._name, ""))
        return Entry(key, None if removed else message.data, revision)

    def _subject(self, key: str) -> str:
        return bucket_subject(self._name, checked_key(key))

    def _filter(self, prefix: str) -> str:
        return bucket_subject(self._name, f"{checked_prefix(prefix)}>")


def _new_id() -> str:
    return os.urandom(12).hex()
