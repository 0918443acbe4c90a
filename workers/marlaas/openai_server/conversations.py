"""Which conversation a list of messages goes on with: the one with the longest beginning that it repeats word for word.

Assistants' messages count as they were answered, calls and their ids included; the text and the tokens behind them are the rollout role's.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from marlaas.environment import Message

_NOTHING = b""


@dataclass(frozen=True, slots=True)
class ConversationState:
    """Where a conversation stands: its last turn (None: at its beginning), and the tools that its template shows."""

    turn: int | None = None
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """What to go on with, what is new of the messages, and a digest of all of them."""

    place: ConversationState
    append: tuple[Message, ...]
    digest: bytes


class Conversations:
    """All conversations of an episode, by agent and by digest of their messages.

    Replies may read alike (several choices do, once a policy is sure): then the list goes on with the first of them that nothing followed yet,
    which is what an agent means that takes its choices in order.
    """

    def __init__(self) -> None:
        self._places: defaultdict[tuple[str, bytes], list[ConversationState]] = defaultdict(list)
        self._followed: set[int | None] = set()

    def find(self, agent: str, messages: Sequence[Message]) -> Found:
        """Find the longest known beginning that leaves something to append; from here on it counts as followed."""
        digests = _digests(messages)
        for known in range(len(messages) - 1, 0, -1):
            places = self._places.get((agent, digests[known]), [])
            if places:
                place = next((one for one in places if one.turn not in self._followed), places[0])
                self._followed.add(place.turn)
                return Found(place, tuple(messages[known:]), digests[-1])
        return Found(ConversationState(), tuple(messages), digests[-1])

    def note(self, agent: str, found: Found, reply: Message, place: ConversationState) -> None:
        """Remember where the conversation stands after a reply."""
        self._places[agent, _digest(found.digest, reply)].append(place)


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """Digests of the first 0, 1, … messages."""
    digests = [_NOTHING]
    for message in messages:
        digests.append(_digest(digests[-1], message))
    return digests


def _digest(before: bytes, message: Message) -> bytes:
    calls = [(call.name, call.arguments, call.id) for call in message.tool_calls]
    said = (message.role, message.content, message.name, message.tool_call_id, calls)
    return hashlib.sha256(before + json.dumps(said).encode()).digest()
