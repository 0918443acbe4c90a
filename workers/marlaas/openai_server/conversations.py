"""Find the conversation that a list of messages continues: the one with the longest identical beginning.

Assistant messages are compared as they were answered, with calls and their ids. The rollout role keeps their text
and tokens.
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
    """State of a conversation: its last turn (None: no turn yet), and the tools that its template shows."""

    turn: int | None = None
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """The state to continue, the messages to append, and a digest of all messages."""

    place: ConversationState
    append: tuple[Message, ...]
    digest: bytes


class Conversations:
    """All conversations of an episode, by agent and by digest of their messages.

    Several conversations may have identical messages, for example when several choices are equal. Then the list
    continues the first of them that nothing has continued yet, which suits an agent that uses its choices in order.
    """

    def __init__(self) -> None:
        self._places: defaultdict[tuple[str, bytes], list[ConversationState]] = defaultdict(list)
        self._followed: set[int | None] = set()

    def find(self, agent: str, messages: Sequence[Message]) -> Found:
        """Find the longest known beginning that leaves messages to append, and mark it as continued."""
        digests = _digests(messages)
        for known in range(len(messages) - 1, 0, -1):
            places = self._places.get((agent, digests[known]), [])
            if places:
                place = next((one for one in places if one.turn not in self._followed), places[0])
                self._followed.add(place.turn)
                return Found(place, tuple(messages[known:]), digests[-1])
        return Found(ConversationState(), tuple(messages), digests[-1])

    def note(self, agent: str, found: Found, reply: Message, place: ConversationState) -> None:
        """Store the state of the conversation after a reply."""
        self._places[agent, _digest(found.digest, reply)].append(place)


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """Return the digests of the first 0, 1, … messages."""
    digests = [_NOTHING]
    for message in messages:
        digests.append(_digest(digests[-1], message))
    return digests


def _digest(before: bytes, message: Message) -> bytes:
    calls = [(call.name, call.arguments, call.id) for call in message.tool_calls]
    said = (message.role, message.content, message.name, message.tool_call_id, calls)
    return hashlib.sha256(before + json.dumps(said).encode()).digest()
