"""The bus seam: the operations on NATS JetStream that roles may use.

`marlaas_api.bus_nats.connect` opens the real bus; `marlaas_api.bus_memory.MemoryBus` is the fake. Both pass
`tests/api/bus_contract`. Payloads are bytes; `marlaas_api.wire` serializes messages.

Delivery is at-least-once: a consumer receives a message again unless it acked the message after its effect. A killed
server keeps all that it stored, but may lose the acks of about the last second: it delivers those messages again.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from marlaas_api.errors import Permanent, Retryable

_TOKEN = r"[^\s.*>]+"
_SUBJECT = re.compile(rf"{_TOKEN}(\.{_TOKEN})*")
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")


@lru_cache(maxsize=4096)
def checked_subject(subject: str) -> str:
    """Return the subject if a message can be published to it: no empty tokens, no wildcards. Raises BusRefused."""
    if not _SUBJECT.fullmatch(subject):
        raise BusRefused(f'cannot publish to "{subject}": not a subject')
    return subject


def checked_key(key: str) -> str:
    """Return the key if a bucket accepts it. Raises BusRefused."""
    if not _KEY.fullmatch(key):
        raise BusRefused(f"not a key of a bucket: {key!r}")
    return key


def checked_prefix(prefix: str) -> str:
    """Return the prefix if it is empty, or consists of whole tokens and ends in a dot. Raises BusRefused."""
    if prefix and not (prefix.endswith(".") and _KEY.fullmatch(prefix[:-1])):
        raise BusRefused(f"not a prefix of whole tokens, ending in a dot: {prefix!r}")
    return prefix


class BusUnavailable(Retryable):
    """The server did not answer in time, or refused temporarily (restarting, hung, full disk or queue)."""


class StreamFull(BusUnavailable):
    """The stream is at its byte limit and discards no old messages; publish again after messages are purged or acked."""


class BusRefused(Permanent):
    """The server permanently refuses: no permission, payload too large, no such stream or consumer, or connection closed."""


class RevisionConflict(Permanent):
    """A compare-and-set found another revision: another writer was first."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message in a stream. sequence: its number within the stream, from 1."""

    subject: str
    sequence: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamState:
    """Last sequence and size of a stream. max_bytes: -1 is unbounded."""

    last_sequence: int
    num_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Position:
    """Progress of a durable consumer.

    acked: sequence up to which it has acked every message. num_behind: number of messages that it has not acked.
    """

    acked: int
    num_behind: int

    def has_acked(self, sequence: int) -> bool:
        """Whether the consumer has acked all of its messages up to a stored sequence."""
        return self.num_behind == 0 or self.acked >= sequence


@dataclass(frozen=True, slots=True)
class Entry:
    """Value of a key. revision: the number for a compare-and-set. data: None if the key was deleted or has expired."""

    key: str
    data: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Request:
    """A core NATS message, which is not stored. reply: subject for answers; empty if none is wanted."""

    subject: str
    reply: str
    data: bytes


class Delivery(Protocol):
    """One claimed message. If it is not settled within the consumer's `ack_wait_s`, it is delivered again."""

    @property
    def stored(self) -> Stored: ...
    @property
    def num_delivered(self) -> int:
        """Number of deliveries of the message so far; 1 on the first."""
        ...

    async def ack(self) -> None:
        """Settle the message for good; return after the server has confirmed. May be repeated.

        Raises:
            BusUnavailable: not confirmed; the message is delivered again, to any client of the consumer, after the ack
                wait.
            BusRefused: the consumer no longer exists.
        """
        ...

    async def nak(self, delay_s: float = 0.0) -> None: ...
    async def term(self) -> None:
        """Settle the message as poison: it is never delivered again."""
        ...

    async def in_progress(self) -> None:
        """Restart the message's ack wait."""
        ...


class Consumer(Protocol):
    """A durable pull consumer."""

    async def fetch(self, batch: int, timeout_s: float) -> list[Delivery]:
        """Claim up to `batch` messages; return as soon as there is at least one.

        Returns an empty list if none arrives within `timeout_s`, also during an outage. Raises BusRefused if the
        consumer was deleted.
        """
        ...


class Bucket(Protocol):
    """A key-value bucket. A key consists of DNS labels (`_=/` are allowed too), separated by dots.

    A write that raised BusUnavailable may have happened: read before the next decision, or repeat it under the same
    `message_id`: it then happens once, and the call returns the first one's revision (see `Bus.publish`). Within one call,
    a broken connection is retried without writing twice.
    """

    @property
    def name(self) -> str: ...

    async def get(self, key: str) -> Entry | None:
        """Return a present key. Any replica of the server may answer, so that the answer can be slightly out of date."""
        ...

    async def get_from_leader(self, key: str) -> Entry | None:
        """Return the newest entry of a key as the stream's leader has it, which is never out of date.

        The entry of a deleted or expired key has no data. None: the leader has no entry of the key, for example because
        the key was never written, its delete marker has expired, or the bucket was emptied.
        """
        ...

    async def put(self, key: str, data: bytes) -> int:
        """Write unconditionally; return the revision."""
        ...

    async def create(self, key: str, data: bytes, *, message_id: str | None = None) -> int:
        """Write if the key is absent or deleted; return the revision. Raises RevisionConflict."""
        ...

    async def update(self, key: str, data: bytes, revision: int, *, message_id: str | None = None) -> int:
        """Write if the key is at `revision`; return the new revision. Raises RevisionConflict."""
        ...

    async def delete(self, key: str, revision: int | None = None, *, message_id: str | None = None) -> None:
        """Remove the key; if `revision` is given, only at that revision. Raises RevisionConflict."""
        ...

    async def entries(self, prefix: str = "") -> list[Entry]:
        """Return all present keys that start with `prefix` (whole dot-separated tokens, e.g. `team-a.`).

        Any replica of the server may answer: a key that is missing may have been written a moment ago.
        """
        ...

    def pages(self, prefix: str = "") -> AsyncIterator[list[Entry]]:
        """Iterate over the same keys in pages of at most 24 MiB, for readers that keep little of each entry.

        A key that changes during the read may come again with its newer entry, which has no data if the key was
        deleted. Entries of keys that were deleted earlier may come, too.
        """
        ...

    def watch(self, prefix: str = "") -> AbstractAsyncContextManager[AsyncIterator[Entry]]:
        """Iterate over all present keys, then over every change, while the context is open.

        Quick changes of one key may arrive as only the last one. After an outage the iteration starts again, with all
        present keys and those that were removed meanwhile. A watch is only a hint, because changes can arrive late: readers also
        reconcile with `entries`. A cancelled `anext` loses nothing.
        """
        ...


class Bus(Protocol):
    """A connection. Every method may raise BusUnavailable (retry) or BusRefused (permanent)."""

    @property
    def max_payload_bytes(self) -> int: ...
    async def publish(
        self, subject: str, data: bytes, *, message_id: str | None = None, expect_last: int | None = None
    ) -> int:
        """Store a message and return its stream sequence.

        Args:
            message_id: a message with the same id within two minutes is stored once; the call returns the first one's
                sequence. With an id, a broken connection is retried within the call.
            expect_last: store only if the subject's last message has this sequence (0: the subject has none).

        Raises:
            StreamFull: the stream is at its limit.
            RevisionConflict: the last message has another sequence. Not raised if the last message has the same
                `message_id`. Without an id, a conflict after BusUnavailable may be with the caller's own earlier
                attempt.
        """
        ...

    async def last(self, stream: str, subject: str) -> Stored | None:
        """Return the newest stored message of exactly this subject."""
        ...

    async def replay(self, stream: str, subject: str, start: int = 1) -> list[Stored]:
        """Return the messages stored now for a subject (wildcards allowed), from sequence `start` on, oldest first."""
        ...

    def pages(self, stream: str, subject: str, start: int = 1) -> AsyncIterator[list[Stored]]:
        """Iterate over the same messages in pages of at most 24 MiB, for readers that keep little of each message."""
        ...

    async def state(self, stream: str) -> StreamState:
        """Return last sequence and size of a stream; the answer may be slightly out of date."""
        ...

    async def purge(self, stream: str, subject: str, up_to: int | None = None) -> None:
        """Remove messages of a subject (wildcards allowed): all, or those with a sequence below `up_to`.

        If all messages of a subject are removed, its sequence for `expect_last` is 0.
        """
        ...

    async def consumer(
        self, stream: str, name: str, subject: str, *, ack_wait_s: float = 30.0, max_pending: int = 1000
    ) -> Consumer:
        """Create the durable consumer `name`, or update and use the existing one; idempotent."""
        ...

    async def claims(self, stream: str, name: str, *, ack_wait_s: float = 30.0) -> Consumer:
        """Return a durable consumer that another client creates, with this ack wait.

        Nothing is sent to the server. While the consumer does not exist, a fetch returns no messages.
        """
        ...

    async def position(self, stream: str, name: str) -> Position | None:
        """Return the progress of a durable consumer; None if it does not exist."""
        ...

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Remove a durable consumer; no error if it does not exist."""
        ...

    async def bucket(self, name: str, *, inspected: bool = True) -> Bucket:
        """Return an existing bucket. With `inspected` False, its existence is not checked before its first use."""
        ...

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish without storing; the message is lost if there is no subscriber."""
        ...

    def listen(
        self, subject: str, handler: Callable[[Request], Awaitable[None]], queue: str = ""
    ) -> AbstractAsyncContextManager[None]:
        """Call `handler` for every core message, one at a time, while the context is open.

        Each message goes to one member of a queue group. An exception of the handler ends the block and is raised by
        the context: the handler must catch errors that one bad message can cause.
        """
        ...

    def new_inbox(self) -> str:
        """Return a subject to which only this connection subscribes."""
        ...

    async def ensure(self) -> None:
        """Create or update all streams and buckets of `marlaas_api.subjects`; idempotent."""
        ...

    async def close(self) -> None: ...
