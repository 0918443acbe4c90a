"""Cache of conversations. A conversation that is not cached is restored from the turns stream through its parent turns."""

from collections import OrderedDict

from marlaas_api.messages import GenerateRequest, Turn
from marlaas_worker.rollout.conversation import Conversation, Tokenizer, restore
from marlaas_worker.rollout.policies import RequestRefused
from marlaas_worker.rollout.record import TurnLog

BYTES_KEPT = 64 << 20
_BYTES_PER_ID = 4

Key = tuple[str, str, str, str, int]


def key_of(message: GenerateRequest | Turn, turn: int) -> Key:
    """Return the cache key of the conversation that ends with `turn`.

    The agent is part of the key, so that no agent continues another agent's conversation.
    """
    return (message.namespace, message.job, message.agent, message.episode, turn)


class Histories:
    """Conversations by their last turn; least recently used ones are evicted beyond about `bytes_kept`."""

    def __init__(self, tokenizer: Tokenizer, log: TurnLog, bytes_kept: int = BYTES_KEPT) -> None:
        self._tokenizer = tokenizer
        self._log = log
        self._room = bytes_kept
        self._kept: OrderedDict[Key, Conversation] = OrderedDict()

    async def parent(self, request: GenerateRequest) -> Conversation | None:
        """Return the conversation that a request continues; None if it begins one.

        Raises RequestRefused (no such turn, or another agent's), and as `TurnLog.find`.
        """
        if request.parent is None:
            return None
        key = key_of(request, request.parent)
        conversation = self._kept.get(key)
        if conversation is not None:
            self._kept.move_to_end(key)
            return conversation
        return await self._restored(request, request.parent)

    def knows_parent(self, request: GenerateRequest) -> bool:
        """Return whether the request's parent is in memory, or the request has none."""
        return request.parent is None or key_of(request, request.parent) in self._kept

    def keep(self, key: Key, conversation: Conversation) -> None:
        """Cache the conversation after a turn."""
        if key in self._kept:
            return
        self._kept[key] = conversation
        self._room -= _weight(conversation)
        while self._room < 0 and len(self._kept) > 1:
            _, forgotten = self._kept.popitem(last=False)
            self._room += _weight(forgotten)

    async def _restored(self, request: GenerateRequest, number: int) -> Conversation:
        turns = await self._log.episode(request.namespace, request.job, request.episode)
        conversation: Conversation | None = None
        for turn in reversed(_lineage(turns, number, request)):
            conversation = restore(self._tokenizer, conversation, turn)
            self.keep(key_of(turn, turn.turn), conversation)
        assert conversation is not None
        return conversation


def _weight(conversation: Conversation) -> int:
    """Return the approximate bytes of a conversation.

    Text counts too: a prompt beyond the context window has no ids, and may be as long as a message.
    """
    text = (
        len(conversation.text) + len(conversation.reply) + sum(len(message.content) for message in conversation.history)
    )
    return _BYTES_PER_ID * len(conversation.ids) + text


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
