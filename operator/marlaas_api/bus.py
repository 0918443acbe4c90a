"""The bus seam: what every role may do with NATS JetStream, and nothing more.

`marlaas_api.bus_nats.connect` is the real one, `marlaas_api.bus_memory.MemoryBus` ships as its fake; both pass
`tests/api/bus_contract`. Payloads are bytes; `marlaas_api.wire` turns messages into them.
At-least-once: a consumer sees a message again unless it acked it after its effect. A killed server loses nothing that it
stored, but may forget its last acks (about a second of them): whatever was acked can come once more.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from marlaas_api.errors import Permanent, Retryable


class BusUnavailable(Retryable):
    """The server did not answer in time, or refused for the moment (restarting, hung, full disk or queue)."""


class StreamFull(BusUnavailable):
    """The stream holds as many bytes as it may and discards nothing: publish again once messages are purged or acked."""


class BusRefused(Permanent):
    """The server refuses this for good: permission, payload too large, stream or consumer missing, closed by us."""


class RevisionConflict(Permanent):
    """A compare-and-set found something else: another writer was first."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message in a stream; `sequence` counts per stream from 1."""

    subject: str
    sequence: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamState:
    """Where a stream stands. max_bytes: -1 is unbounded."""

    last_sequence: int
    num_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a durable consumer stands: it has acked every message up to the sequence `acked`; `num_behind` messages are not acked."""

    acked: int
    num_behind: int

    def has_acked(self, sequence: int) -> bool:
        """Whether every message of the consumer up to a stored sequence is acked."""
        return self.num_behind == 0 or self.acked >= sequence


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value; `revision` is what a compare-and-set names. `data` None: deleted or expired."""

    key: str
    data: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Request:
    """A core (unstored) message; `reply` is where answers go, empty if none are wanted."""

    subject: str
    reply: str
    data: bytes


class Delivery(Protocol):
    """One claimed message. Not settled within the consumer's `ack_wait_s`, it is delivered again."""

    @property
    def stored(self) -> Stored: ...
    @property
    def num_delivered(self) -> int:
        """1 on the first delivery."""
        ...

    async def ack(self) -> None:
        """Settle for good; returns when the server has noted it. May be repeated.

        BusUnavailable: not noted, the message comes again (to somebody, after the ack wait). BusRefused: the consumer is gone.
        """
        ...

    async def nak(self, delay_s: float = 0.0) -> None: ...
    async def term(self) -> None:
        """Never deliver again (poison)."""
        ...

    async def in_progress(self) -> None:
        """Start ack_wait anew."""
        ...


class Consumer(Protocol):
    """A durable pull consumer."""

    async def fetch(self, batch: int, timeout_s: float) -> list[Delivery]:
        """Claim up to `batch` messages; an empty list when none came within `timeout_s`, be it for an outage.

        Returns with what there is as soon as there is something. Raises BusRefused when the consumer was deleted.
        """
        ...


class Bucket(Protocol):
    """A key-value bucket. A key is DNS labels (also with `_=/`) and dots.

    A write that raised BusUnavailable may have happened: read before deciding anew. Inside one call a broken connection is
    retried without writing twice.
    """

    async def get(self, key: str) -> Entry | None: ...
    async def put(self, key: str, data: bytes) -> int:
        """Write whatever was there; return the revision."""
        ...

    async def create(self, key: str, data: bytes) -> int:
        """Write if the key is absent (or was deleted). Raises Conflict."""
        ...

    async def update(self, key: str, data: bytes, revision: int) -> int:
        """Write if the key is at `revision`. Raises Conflict."""
        ...

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Remove; with a revision only if the key is at it. Raises Conflict."""
        ...

    async def entries(self, prefix: str = "") -> list[Entry]:
        """All present keys that start with `prefix` (whole dot-separated tokens, e.g. `team-a.`)."""
        ...

    def watch(self, prefix: str = "") -> AbstractAsyncContextManager[AsyncIterator[Entry]]:
        """First all present keys, then every change (of quick ones perhaps only the last), while the context is open.

        After an outage it begins again: keys that went, then all present keys. A hint, not a truth: changes can come late.
        Readers also reconcile with `entries`. A cancelled `anext` loses nothing.
        """
        ...


class Bus(Protocol):
    """A connection. Every method raises BusUnavailable (try again) or BusRefused (do not)."""

    @property
    def max_payload_bytes(self) -> int: ...
    async def publish(
        self, subject: str, data: bytes, *, message_id: str | None = None, expect_last: int | None = None
    ) -> int:
        """Store and return the stream sequence. Raises StreamFull.

        message_id: the same id within two minutes is stored once (the first one's sequence comes back); a broken connection
        is then retried within the call.
        expect_last: store only if the subject's last message has this sequence (0: none yet). Raises Conflict, except when that
        last message is this very one (same `message_id`). Without an id, a Conflict after BusUnavailable may be with oneself.
        """
        ...

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The newest stored message of exactly this subject."""
        ...

    async def replay(self, stream: str, subject: str, start: int = 1) -> list[Stored]:
        """All stored messages of a subject (wildcards allowed) from a sequence on, oldest first, as of now."""
        ...

    async def state(self, stream: str) -> StreamState:
        """Last sequence and size of a stream, as of now or a moment ago."""
        ...

    async def purge(self, stream: str, subject: str, up_to: int | None = None) -> None:
        """Forget messages of a subject (wildcards allowed), all or those with a sequence below `up_to`.

        A subject that is purged to its last message has the sequence 0 for `expect_last`.
        """
        ...

    async def consumer(
        self, stream: str, name: str, subject: str, *, ack_wait_s: float = 30.0, max_pending: int = 1000
    ) -> Consumer:
        """Create or take up the durable consumer `name`; idempotent."""
        ...

    async def claims(self, stream: str, name: str, *, ack_wait_s: float = 30.0) -> Consumer:
        """A durable consumer that somebody else creates, with this ack wait. Nothing is asked about it: while there is none, a fetch finds
        nothing.
        """
        ...

    async def position(self, stream: str, name: str) -> Position | None:
        """Where the durable consumer stands; None while there is none."""
        ...

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Remove a durable consumer; no error when it is not there."""
        ...

    async def bucket(self, name: str, *, inspected: bool = True) -> Bucket:
        """A bucket that is there; not `inspected`: whether it is there shows at its first use."""
        ...

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish without storing; lost if nobody listens."""
        ...

    def listen(
        self, subject: str, handler: Callable[[Request], Awaitable[None]], queue: str = ""
    ) -> AbstractAsyncContextManager[None]:
        """Call `handler` for every core message, one after another, while the context is open; members of a queue share.

        What the handler raises ends the block and comes out of the context: catch there what one bad message may cause.
        """
        ...

    def new_inbox(self) -> str:
        """A subject that only this connection listens to."""
        ...

    async def ensure(self) -> None:
        """Create or update all streams and buckets of `marlaas_api.subjects`; idempotent."""
        ...

    async def close(self) -> None: ...
