"""Recorded turns, and the conversations that end with them.

The first record of a turn counts, whichever replica wrote it. A conversation that is not cached is restored from the
turns stream through its parent turns.
"""

import logging
import sys
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

from marlaas_api import subjects, wire
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus, Stored, StreamFull
from marlaas_api.errors import Permanent
from marlaas_api.failpoints import failpoint
from marlaas_api.fenced import FencedSubject, Overtaken
from marlaas_api.messages import GenerateRequest, Turn
from marlaas_api.names import request_id
from marlaas_api.retries import patiently
from marlaas_worker.rollout.conversation import Conversation, Tokenizer, beginning, restore
from marlaas_worker.rollout.policies import RequestRefused

_HEADROOM_BYTES = 4096
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 1.0
_MESSAGE_BYTES = 256
"""Stream bytes per message besides its data: subject, headers, and the stream's own record."""
BYTES_KEPT = 64 << 20
_BYTES_PER_ID = 4
_MESSAGE_OBJECT_BYTES = 512

Key = tuple[str, str, str, str, int]
T = TypeVar("T")


class TurnLost(Permanent):
    """The stream rejected a turn as already recorded, but the recorded turn cannot be read."""


class TurnLog:
    """Writes and reads turns; turns above the bus's payload limit go through the blob store.

    job_bytes: bytes that this replica has added to the stream, by job uid.
    """

    def __init__(self, bus: Bus, blobs: Blobs) -> None:
        self._bus = bus
        self._blobs = blobs
        self.job_bytes: Counter[str] = Counter()
        self._waiting: set[str] = set()

    @property
    def num_waiting(self) -> int:
        """Turns that wait because the stream is full."""
        return len(self._waiting)

    def explain(self) -> str:
        """Return a sentence for an error message: whether the stream is full."""
        return f"the stream {subjects.TURNS} is full" if self._waiting else f"the stream {subjects.TURNS} has room"

    def forget(self, uids: Collection[str]) -> None:
        """Drop the totals of jobs that are gone."""
        for uid in uids:
            self.job_bytes.pop(uid, None)

    async def find(self, namespace: str, job: str, episode: str, number: int) -> Turn | None:
        """Return a recorded turn; None if it is not recorded. Raises BusUnavailable, and as `wire.unpack`."""
        stored = await self._bus.last(subjects.TURNS, subjects.turn(namespace, job, episode, number))
        return None if stored is None else await self._read(stored)

    async def episode(self, namespace: str, job: str, episode: str) -> dict[int, Turn]:
        """Return all recorded turns of an episode by number. Raises as `find`."""
        stored = await self._bus.replay(subjects.TURNS, subjects.turn(namespace, job, episode, "*"))
        turns = [await self._read(one) for one in stored]
        return {turn.turn: turn for turn in turns}

    async def record(self, turn: Turn) -> Turn:
        """Store a turn unless it is already stored; return the stored one.

        Retries with backoff, until cancelled, while the bus or the blob store is unavailable, the store refuses the
        credentials, or the stream is full.
        """
        name = request_id(turn.episode, turn.turn)
        limit = self._bus.max_payload_bytes - _HEADROOM_BYTES
        data = await self._persist(lambda: wire.pack(turn, self._blobs, limit), name)
        # The message id of the one write is this replica's own: another replica's turn is not taken for it.
        subject = FencedSubject(self._bus, subjects.turn(turn.namespace, turn.job, turn.episode, turn.turn))

        async def publish() -> None:
            failpoint("rollout.record.before_publish")
            try:
                await subject.append(data)
            except StreamFull:
                self._waiting.add(name)
                raise

        try:
            await self._persist(publish, name)
        except Overtaken:
            return await self._persist(lambda: self._first(turn), name)
        finally:
            self._waiting.discard(name)
        self.job_bytes[turn.uid] += len(data) + _MESSAGE_BYTES
        failpoint("rollout.record.after_publish")
        return turn

    async def _persist(self, call: Callable[[], Awaitable[T]], name: str) -> T:
        level = logging.DEBUG if self._waiting else logging.WARNING  # with a full stream, every turn waits
        return await patiently(call, f"turn {name}", _FIRST_WAIT_S, longest_s=_LONGEST_WAIT_S, level=level)

    async def _first(self, turn: Turn) -> Turn:
        stored = await self.find(turn.namespace, turn.job, turn.episode, turn.turn)
        if stored is None:
            raise TurnLost(f"turn {turn.turn} of {turn.episode} is recorded, but cannot be read")
        return stored

    async def _read(self, stored: Stored) -> Turn:
        message = await wire.unpack(stored.data, self._blobs, stored.subject)
        if not isinstance(message, Turn):
            raise wire.BadMessage(f"expected Turn, found {type(message).__name__}")
        return message


def key_of(message: GenerateRequest | Turn, turn: int) -> Key:
    """Return the cache key of the conversation that ends with `turn`.

    The agent is part of the key, so that no agent continues another agent's conversation.
    """
    return (message.namespace, message.job, message.agent, message.episode, turn)


@dataclass(slots=True)
class _Kept:
    """A cached conversation. has_branches: whether more than one turn continued it."""

    conversation: Conversation
    num_bytes: int
    has_branches: bool = False


class Histories:
    """Conversations by their last turn; least recently used ones are evicted beyond about `bytes_kept`.

    A conversation is replaced by the one that continues it, so that an open episode needs one place. If a second turn
    continues it nevertheless, it is restored and then kept, because more may follow.
    """

    def __init__(self, log: TurnLog, bytes_kept: int = BYTES_KEPT) -> None:
        self.log = log
        self._left_bytes = bytes_kept
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    async def parent(self, request: GenerateRequest, tokenizer: Tokenizer) -> Conversation | None:
        """Return the conversation that a request continues; None if it begins one. tokenizer: of its job.

        Raises RequestRefused (no such turn, or another agent's), and as `TurnLog.find`.
        """
        if request.parent is None:
            return None
        key = key_of(request, request.parent)
        kept = self._kept.get(key)
        if kept is None:
            return await self._restored(request, request.parent, tokenizer)
        self._kept.move_to_end(key)
        return kept.conversation

    def knows_parent(self, request: GenerateRequest) -> bool:
        """Return whether the request's parent is in memory, or the request has none."""
        return request.parent is None or key_of(request, request.parent) in self._kept

    def keep(self, key: Key, conversation: Conversation, parent: int | None = None) -> None:
        """Cache the conversation after a turn, in place of the one that it continues.

        parent: number of the turn that it continues.
        """
        if parent is not None:
            replaced = (*key[:4], parent)
            if replaced in self._kept and not self._kept[replaced].has_branches:
                self._drop(replaced)
        self._keep(key, conversation)

    def forget(self, uids: Collection[str]) -> None:
        """Drop the conversations of jobs that are gone."""
        for key in [key for key in self._kept if any(key[3].startswith(f"{uid}-") for uid in uids)]:
            self._drop(key)

    def _keep(self, key: Key, conversation: Conversation, *, has_branches: bool = False) -> None:
        if key in self._kept:
            return
        self._kept[key] = _Kept(conversation, _weight(conversation), has_branches)
        self._left_bytes -= self._kept[key].num_bytes
        while self._left_bytes < 0 and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: Key) -> None:
        self._left_bytes += self._kept.pop(key).num_bytes

    async def _restored(self, request: GenerateRequest, number: int, tokenizer: Tokenizer) -> Conversation:
        turns = await self.log.episode(request.namespace, request.job, request.episode)
        conversation: Conversation | None = None
        for turn in reversed(_lineage(turns, number, request)):
            conversation = restore(tokenizer, conversation, turn)
        assert conversation is not None
        is_continued = any(turn.parent == number for turn in turns.values())
        self._keep(key_of(request, number), conversation, has_branches=is_continued)
        return conversation


def require_same(turn: Turn, request: GenerateRequest) -> Turn:
    """Return the recorded turn, which must answer this request.

    Raises RequestRefused if agent, parent or content differ. After a crash of the bus a task may be played
    twice under the same names, and its environment may write other texts. An answer to the other play's text
    would be scored here and trained with the other prompt. After the refusal this play ends as a fault and is
    repeated under a new name.
    """
    if turn.agent != request.agent:
        raise RequestRefused(f"turn {turn.turn} of episode {turn.episode} is agent {turn.agent}'s")
    wanted = (request.append, request.tools)
    is_same = turn.parent == request.parent and turn.demonstration == request.demonstration
    if not is_same or (turn.append, turn.tools) not in (wanted, beginning(request)):
        raise RequestRefused(
            f"turn {turn.turn} of episode {turn.episode} is recorded with another parent or text: another play has this name"
        )
    return turn


def _weight(conversation: Conversation) -> int:
    """Return the approximate bytes of a conversation.

    Text counts too: a prompt beyond the context window has no ids, and may be as long as a message.
    """
    contents = (message.content for message in conversation.history or ())
    text = sum(map(sys.getsizeof, (conversation.text, conversation.reply, *contents)))
    return _BYTES_PER_ID * len(conversation.ids) + text + _MESSAGE_OBJECT_BYTES * len(conversation.history or ())


def _lineage(turns: dict[int, Turn], number: int, request: GenerateRequest) -> list[Turn]:
    """Return a turn and its ancestors, newest first. Raises RequestRefused if one is missing or another agent's."""
    lineage: list[Turn] = []
    following: int | None = number
    while following is not None:
        turn = turns.get(following)
        if turn is None or (lineage and turn.turn >= lineage[-1].turn and turn in lineage):
            raise RequestRefused(f"turn {following} of episode {request.episode} is not recorded")
        if turn.agent != request.agent:
            raise RequestRefused(f"turn {following} of episode {request.episode} is agent {turn.agent}'s")
        lineage.append(turn)
        following = turn.parent
    return lineage
