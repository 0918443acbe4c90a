"""A JetStream stream and its consumers as plain data: the part of the bus fake without asyncio and without a clock.

Times are seconds of the caller's clock.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from marlaas_api.bus import BusRefused, Entry, Position, RevisionConflict, Stored, StreamFull
from marlaas_api.subjects import BucketSpec, StreamSpec

DUPLICATE_WINDOW_S = 120.0
PAGE, PAGE_BYTES = 1000, 16 << 20
"""Most messages, and bytes, of a page."""

M = TypeVar("M", Stored, Entry)


def paged(messages: Iterable[M]) -> Iterator[list[M]]:
    """Divide messages into pages. The last page may be empty."""
    page: list[M] = []
    num_bytes = 0
    for message in messages:
        size = len(message.data or b"")
        num_bytes += size
        if page and (len(page) == PAGE or num_bytes > PAGE_BYTES):
            yield page
            page, num_bytes = [], size
        page.append(message)
    yield page


def matches(pattern: str, subject: str) -> bool:
    """Match a subject as NATS does: `*` is one token, a final `>` is one or more."""
    if "*" not in pattern:
        return subject.startswith(pattern[:-1]) if pattern.endswith(">") else pattern == subject
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(found) <= len(wanted):
            return False
        found = found[: len(wanted)]
    return len(wanted) == len(found) and all(want in ("*", have) for want, have in zip(wanted, found, strict=True))


def overlaps(one: str, other: str) -> bool:
    """Whether there is a subject that matches both patterns."""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left) == len(right)


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored message. removal: it marks a removed key of a bucket."""

    stored: Stored
    at: float
    message_id: str | None = None
    removal: bool = False


@dataclass(slots=True)
class ConsumerState:
    """State of a durable consumer. pending: time of the next delivery by claimed sequence."""

    subject: str
    ack_wait_s: float
    max_pending: int
    next_sequence: int = 1
    pending: dict[int, float] = field(default_factory=dict)
    num_delivered: dict[int, int] = field(default_factory=dict)

    def settle(self, sequence: int) -> None:
        """Remove a message from the claimed ones, so that it is not delivered again."""
        self.pending.pop(sequence, None)
        self.num_delivered.pop(sequence, None)


@dataclass(slots=True)
class MemoryStream:
    """A stream. history: limit of messages per subject (for buckets). markers: expiry leaves a removal."""

    spec: StreamSpec
    history: int | None = None
    markers: bool = False
    last_sequence: int = 0
    num_bytes: int = 0
    kept: dict[int, Kept] = field(default_factory=dict)
    by_subject: dict[str, list[int]] = field(default_factory=dict)
    ids: dict[str, tuple[int, float]] = field(default_factory=dict)
    consumers: dict[str, ConsumerState] = field(default_factory=dict)

    @classmethod
    def of_bucket(cls, spec: BucketSpec) -> "MemoryStream":
        """Return the stream behind a bucket."""
        stream = StreamSpec(f"KV_{spec.name}", (f"$KV.{spec.name}.>",), max_age_s=spec.ttl_s)
        return cls(stream, history=spec.history, markers=spec.ttl_s is not None)

    def publish(
        self,
        stored: Stored,
        now: float,
        *,
        message_id: str | None = None,
        expect_last: int | None = None,
        removal: bool = False,
    ) -> int:
        """Store a message, ignoring `stored.sequence`, and return its sequence. The order of the checks is that of a server without replicas.

        Raises RevisionConflict, StreamFull, and BusRefused for a message that is too long.
        """
        last = self.last(stored.subject)
        if expect_last is not None and expect_last != (last.stored.sequence if last else 0):
            if last is not None and message_id is not None and last.message_id == message_id:
                return last.stored.sequence
            raise RevisionConflict(
                f'cannot publish to "{stored.subject}": wrong last sequence: {last and last.stored.sequence}'
            )
        if message_id in self.ids and now - self.ids[message_id][1] < DUPLICATE_WINDOW_S:
            return self.ids[message_id][0]
        self._make_room(stored)
        sequence = self.append(Kept(stored, now, message_id, removal))
        if message_id is not None:
            self.ids.pop(message_id, None)
            self.ids[message_id] = (sequence, now)
        while self.ids and now - next(iter(self.ids.values()))[1] >= DUPLICATE_WINDOW_S:
            del self.ids[next(iter(self.ids))]
        return sequence

    def append(self, kept: Kept) -> int:
        """Store a message under the next sequence and return the sequence."""
        self.last_sequence += 1
        subject = kept.stored.subject
        self.kept[self.last_sequence] = replace(kept, stored=replace(kept.stored, sequence=self.last_sequence))
        self.by_subject.setdefault(subject, []).append(self.last_sequence)
        self.num_bytes += len(kept.stored.data)
        while self.history is not None and len(self.by_subject[subject]) > self.history:
            self.remove(self.by_subject[subject][0])
        return self.last_sequence

    def remove(self, sequence: int) -> None:
        """Remove one message, also from the consumers."""
        gone = self.kept.pop(sequence, None)
        if gone is not None:
            self.num_bytes -= len(gone.stored.data)
            sequences = self.by_subject[gone.stored.subject]
            sequences.remove(sequence)
            if not sequences:
                del self.by_subject[gone.stored.subject]
        for consumer in self.consumers.values():
            consumer.settle(sequence)

    def last(self, subject: str) -> Kept | None:
        """Return the newest message of exactly this subject."""
        sequences = self.by_subject.get(subject)
        return self.kept[sequences[-1]] if sequences else None

    def select(self, pattern: str, start: int = 1) -> list[Kept]:
        """Return all messages of a subject (wildcards allowed) from a sequence on, oldest first."""
        if start > self.last_sequence:
            return []
        wanted = (sequences for subject, sequences in self.by_subject.items() if matches(pattern, subject))
        return [self.kept[sequence] for sequence in sorted(s for group in wanted for s in group if s >= start)]

    def expire(self, now: float) -> None:
        """Remove messages older than `max_age_s`."""
        if self.spec.max_age_s is None:
            return
        for sequence, kept in list(self.kept.items()):
            if now - kept.at < self.spec.max_age_s:
                break
            self.remove(sequence)
            if self.markers and not kept.removal and kept.stored.subject not in self.by_subject:
                self.append(Kept(Stored(kept.stored.subject, 0, b""), now, removal=True))

    def next_expiry(self) -> float | None:
        """Return the time when the next message expires; None if none does."""
        first = next(iter(self.kept.values()), None)
        return None if first is None or self.spec.max_age_s is None else first.at + self.spec.max_age_s

    def consume(self, name: str, wanted: ConsumerState) -> None:
        """Create or update a durable consumer; an existing one keeps its position. Raises BusRefused."""
        others = [state.subject for other, state in self.consumers.items() if other != name]
        if self.spec.work_queue and any(overlaps(wanted.subject, subject) for subject in others):
            raise BusRefused(
                f'cannot create the consumer {name}: another one of the work queue covers "{wanted.subject}"'
            )
        state = self.consumers.setdefault(name, wanted)
        state.subject, state.ack_wait_s, state.max_pending = wanted.subject, wanted.ack_wait_s, wanted.max_pending

    def claim(self, name: str, batch: int, now: float) -> list[tuple[Kept, int]]:
        """Claim up to `batch` messages, overdue ones first; return each with its delivery count. Raises BusRefused."""
        state = self.consumers.get(name)
        if state is None:
            raise BusRefused(f"cannot fetch from the consumer {name} of {self.spec.name}: consumer not found")
        overdue = sorted(sequence for sequence, due in state.pending.items() if due <= now)
        claimed = overdue[:batch]
        while len(claimed) < batch and len(state.pending) < state.max_pending:
            sequence = self._next(state)
            if sequence is None:
                break
            state.pending[sequence] = now
            claimed.append(sequence)
        for sequence in claimed:
            state.pending[sequence] = now + state.ack_wait_s
            state.num_delivered[sequence] = state.num_delivered.get(sequence, 0) + 1
        return [(self.kept[sequence], state.num_delivered[sequence]) for sequence in claimed]

    def settle(self, name: str, sequence: int) -> None:
        """Ack or term a message; a work queue removes it."""
        state = self.consumers.get(name)
        if state is None:
            raise BusRefused(f"cannot settle a message of {name}: consumer not found")
        state.settle(sequence)
        if self.spec.work_queue:
            self.remove(sequence)

    def postpone(self, name: str, sequence: int, now: float, delay_s: float | None) -> None:
        """Deliver a claimed message again after `delay_s` (None: the ack wait); no effect once it is settled."""
        state = self.consumers.get(name)
        if state is not None and sequence in state.pending:
            state.pending[sequence] = now + (state.ack_wait_s if delay_s is None else delay_s)

    def position(self, name: str) -> Position | None:
        """Return the progress of a consumer; None if it does not exist."""
        state = self.consumers.get(name)
        if state is None:
            return None
        behind = sorted({*state.pending, *(k.stored.sequence for k in self.select(state.subject, state.next_sequence))})
        return Position(behind[0] - 1 if behind else self.last_sequence, len(behind))

    def next_due(self, name: str) -> float | None:
        """Return the time of the next redelivery of a claimed message of the consumer; None if there is none."""
        state = self.consumers.get(name)
        return min(state.pending.values(), default=None) if state is not None else None

    def _next(self, state: ConsumerState) -> int | None:
        for sequence in range(state.next_sequence, self.last_sequence + 1):
            kept = self.kept.get(sequence)
            if kept is not None and matches(state.subject, kept.stored.subject):
                state.next_sequence = sequence + 1
                return sequence
        state.next_sequence = self.last_sequence + 1
        return None

    def _make_room(self, stored: Stored) -> None:
        if 0 <= self.spec.max_message_bytes < len(stored.data):
            raise BusRefused(f'cannot publish to "{stored.subject}": message size exceeds maximum allowed')
        if self.spec.max_bytes < 0:
            return
        room = self.spec.max_bytes - len(stored.data)
        if self.num_bytes > room and self.spec.refuses_when_full:
            raise StreamFull(f'cannot publish to "{stored.subject}": maximum bytes exceeded')
        while self.kept and self.num_bytes > room:
            self.remove(next(iter(self.kept)))
