"""Watches of buckets: all present keys, then changes, over any number of outages.

An ephemeral consumer follows the bucket's stream. The bucket is read again whenever the consumer may be lost (the
connection broke, or the server restarted without it). A watcher therefore receives every key that is present then, and
every key that was removed meanwhile.
"""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable

from marlaas_api.bus import BusRefused, BusUnavailable, Entry
from marlaas_api.bus_nats.consumers import DeliveryPosition
from marlaas_api.bus_nats.jetstream import API, JetStream
from marlaas_api.bus_nats.layout import nanoseconds
from marlaas_api.bus_nats.link import Link
from marlaas_api.bus_nats.pulls import Pull
from marlaas_api.bus_nats.routes import Incoming

_BATCH = 256
# Interval at which the request for changes is renewed; a consumer that the server has lost is detected within it.
_RENEW_S = 15.0
_GRACE_S = 1.0
_FORGET_S = 60.0
_BACKOFF_S = 0.25


class StreamReader:
    """Reader of a stream's messages on a subject from a sequence on. Its position is not durable, and any failure ends it."""

    def __init__(self, jetstream: JetStream, link: Link, stream: str, subject: str) -> None:
        self._jetstream = jetstream
        self._link = link
        self._stream = stream
        self._subject = subject
        self._name = ""
        self._pull: Pull | None = None
        self._renew_at = 0.0
        self.arrived: deque[Incoming] = deque()

    async def start(self, sequence: int) -> None:
        """Start, or restart, at a sequence. Raises BusUnavailable, BusRefused."""
        await self.end()
        name = f"watch{os.urandom(8).hex()}"
        config = {
            "name": name,
            "filter_subject": self._subject,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": sequence,
            "ack_policy": "none",
            "inactive_threshold": nanoseconds(_FORGET_S),
            "mem_storage": True,
            "num_replicas": 1,
        }
        call = f"CONSUMER.CREATE.{self._stream}.{name}.{self._subject}"
        await self._jetstream.api(call, f"watch {self._stream}", {"stream_name": self._stream, "config": config})
        self._name = name
        self.arrived = deque()
        call = f"{API}.CONSUMER.MSG.NEXT.{self._stream}.{self._name}"
        self._pull = Pull(self._link, call, self.arrived.append)
        await self._ask(self._pull)

    async def more(self) -> None:
        """Wait until messages may have arrived.

        Raises:
            BusUnavailable: the reader has ended; start it again.
            BusRefused: the server permanently refuses.
        """
        if self._pull is None:
            raise BusUnavailable("NATS: the watch has not started yet")
        if not self._pull.over:
            if not await self._pull.news(self._renew_at):
                raise BusUnavailable(f"NATS: the watch of {self._stream} received no heartbeat")
        elif self._pull.failure is not None:
            raise self._pull.failure
        elif self._pull.ended is None or self._pull.ended.startswith(("404", "408")):
            await self._ask(self._pull)
        else:
            raise BusUnavailable(f"NATS: the watch of {self._stream} ended: {self._pull.ended}")

    async def end(self) -> None:
        """Stop reading; the server removes the abandoned consumer after a minute."""
        pull, self._pull = self._pull, None
        if pull is not None:
            await pull.close()

    async def remove(self) -> None:
        """Stop reading and ask the server to delete the consumer, without waiting for an answer."""
        await self.end()
        if self._name and self._link.connected:
            await self._link.send(f"{API}.CONSUMER.DELETE.{self._stream}.{self._name}", b"")

    async def _ask(self, pull: Pull) -> None:
        await pull.ask(_BATCH, _RENEW_S, no_wait=False)
        self._renew_at = asyncio.get_running_loop().time() + _RENEW_S + _GRACE_S


class BucketWatch:
    """The iterator of `Bucket.watch`. A cancelled `anext` loses nothing.

    Args:
        page: returns the bucket's next entries from a revision on; none: all are read.
    """

    def __init__(
        self,
        tail: StreamReader,
        page: Callable[[int], Awaitable[list[Entry]]],
        entry: Callable[[str, int, Incoming], Entry],
    ) -> None:
        self._tail = tail
        self._page = page
        self._entry = entry
        self._ready: deque[Entry] = deque()
        self._known: dict[str, int] = {}
        # Keys of an earlier read of the bucket that the present one has not found yet.
        self._unseen: set[str] = set()
        self._start = 1
        self._synced = False

    def __aiter__(self) -> "BucketWatch":
        return self

    async def __anext__(self) -> Entry:
        while True:
            if self._ready:
                return self._ready.popleft()
            if self._synced and self._tail.arrived:
                message = self._tail.arrived.popleft()
                return self._noted(self._entry(message.subject, DeliveryPosition.of(message).sequence, message))
            try:
                await (self._tail.more() if self._synced else self._read())
            except BusRefused:
                raise
            except BusUnavailable:
                self._synced, self._start, self._unseen = False, 1, set(self._known)
                await asyncio.sleep(_BACKOFF_S)

    async def stop(self) -> None:
        """End the watch."""
        await self._tail.remove()

    async def _read(self) -> None:
        """Read the bucket's next page; after the last one, report the keys that are gone, and start to follow changes."""
        entries = await self._page(self._start)
        if not entries:
            await self._tail.start(self._start)
            self._ready.extend(Entry(key, None, self._known.pop(key)) for key in sorted(self._unseen))
            self._synced = True
            return
        self._start = entries[-1].revision + 1
        for entry in entries:
            self._unseen.discard(entry.key)
            if entry.data is not None or entry.key in self._known:
                self._ready.append(self._noted(entry))

    def _noted(self, entry: Entry) -> Entry:
        if entry.data is None:
            self._known.pop(entry.key, None)
        else:
            self._known[entry.key] = entry.revision
        return entry
