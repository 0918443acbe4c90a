"""OpenAI server of an episode: converts requests to turns of the episode's agents, and replies to completions.

A request's list of messages continues the conversation with the longest identical beginning. Assistant messages are
compared as they were answered, with calls and their ids. The rollout role keeps their text and tokens.
"""

import dataclasses
import hashlib
import json
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from marlaas.environment import Message, Reply, TurnLimit
from marlaas.environment_types import TurnRequest
from marlaas.episode_state import EpisodeState, OpenTurn
from marlaas.openai_server.answers import Answer, ReplyChoice
from marlaas.openai_server.chat_request import TURN_LIMIT, ChatRequest, RequestError, mentions_turn_limit, read
from marlaas.openai_server.loopback import Loopback
from marlaas_api.errors import InvalidInput

_NOTHING = b""


@dataclass(frozen=True, slots=True)
class ConversationState:
    """State of a conversation: its last turn (None: no turn yet), and the tools that its template shows."""

    turn: int | None = None
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """The state to continue, the messages to append, and the digests of all messages and of all but the last."""

    place: ConversationState
    append: tuple[Message, ...]
    digest: bytes
    before: bytes


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
                return Found(place, tuple(messages[known:]), digests[-1], digests[-2])
        return Found(ConversationState(), tuple(messages), digests[-1], digests[-2])

    def note(self, agent: str, found: Found, reply: Message, place: ConversationState) -> None:
        """Store the state of the conversation after a reply.

        Clients send back a reply that continues an assistant's message as a message of its own, or joined with that message.
        """
        self._places[agent, _digest(found.digest, reply)].append(place)
        last = found.append[-1]
        if last.role == "assistant":
            joined = dataclasses.replace(reply, content=last.content + reply.content)
            self._places[agent, _digest(found.before, joined)].append(place)


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """Return the digests of the first 0, 1, … messages."""
    digests = [_NOTHING]
    for message in messages:
        digests.append(_digest(digests[-1], message))
    return digests


def _digest(before: bytes, message: Message) -> bytes:
    calls = [(call.name, call.arguments, call.id) for call in message.tool_calls]
    content = (message.role, message.content, message.name, message.tool_call_id, calls)
    return hashlib.sha256(before + json.dumps(content).encode()).digest()


class OpenAIServer:
    """Context manager that serves chat completions for the agents of one episode.

    Requests may be open at the same time; those of a strict job, one at a time. A request beyond the turn limit is answered with 403 and code `turn_limit`. If that error, or an exception that
    wraps it, leaves the context, it is replaced by TurnLimit, which ends the episode, scored.
    """

    def __init__(self, episode: EpisodeState) -> None:
        self.api_key = f"sk-marlaas-{secrets.token_urlsafe(24)}"
        self._episode = episode
        self._conversations = Conversations()
        self._limit: TurnLimit | None = None
        self._loopback: Loopback | None = None
        self._opened_in = episode.branch()
        self._lock = threading.Lock()

    @property
    def base_url(self) -> str:
        """Base URL for a client. Raises RuntimeError outside of the context."""
        if self._loopback is None:
            raise RuntimeError("the server is not running: use it as `with agent.openai() as server:`")
        return f"http://127.0.0.1:{self._loopback.port}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that configure a client in this process or in a child process."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}

    @property
    def models(self) -> tuple[str, ...]:
        """The agents' names."""
        return tuple(self._episode.rewards)

    @property
    def is_strict(self) -> bool:
        """Whether requests must come one at a time: maxStaleness is 0."""
        return self._episode.is_strict

    def __enter__(self) -> Self:
        self._loopback = Loopback(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loopback is not None:
            self._loopback.close()
            self._loopback = None
        if self._limit is not None and isinstance(error, Exception) and mentions_turn_limit(error):
            raise TurnLimit(str(self._limit)) from error

    def allows(self, authorization: str | None) -> bool:
        """Return whether the request has the episode's API key."""
        return secrets.compare_digest((authorization or "").encode(), f"Bearer {self.api_key}".encode())

    def complete(self, body: object) -> tuple[ChatRequest, Answer]:
        """Answer one request. Raises RequestError."""
        asked = read(body, self._episode.temperature)
        if asked.model not in self.models:
            text = f"model {asked.model!r} does not exist; the job's agents are {', '.join(self.models)}"
            raise RequestError(text, param="model", status=404, code="model_not_found")
        return asked, Answer(asked.model, int(time.time()), self._choices(asked))

    def _choices(self, asked: ChatRequest) -> list[ReplyChoice]:
        with self._lock:  # held while turns get their numbers, not while they are generated
            found = self._conversations.find(asked.model, asked.messages)
            turns = self._begun(asked, found)
        try:
            replies = self._episode.generate(turns)
        except TurnLimit as limit:
            self._limit = limit
            raise RequestError(str(limit), status=403, code=TURN_LIMIT) from limit
        choices = [_choice(asked, reply) for reply in replies]
        with self._lock:
            for one in choices:
                state = ConversationState(one.reply.turn, asked.tools)
                self._conversations.note(asked.model, found, one.message, state)
        return choices

    def _begun(self, asked: ChatRequest, found: Found) -> list[OpenTurn]:
        """Begin a turn for each choice; all are within the turn limit, or none is. Raises RequestError."""
        tools = None if asked.tools == found.place.tools else asked.tools
        request = TurnRequest(asked.model, found.place.turn, found.append, asked.max_tokens, tools, stop=asked.stop)
        try:
            return self._episode.begin_served(request, asked.num_choices, self._opened_in)
        except InvalidInput as error:
            raise RequestError(str(error), code="not_allowed") from error


def _choice(asked: ChatRequest, reply: Reply) -> ReplyChoice:
    """Return the reply as the client sees it. If it asks for no tools, a call is text, as every other text.

    The ids of calls contain the turn, so a client that repeats them identifies the conversation.
    """
    if reply.tool_calls and not asked.calls:
        return ReplyChoice(reply, Message("assistant", _until(reply.text, asked.stop)))
    named = tuple(
        dataclasses.replace(call, id=f"call_{reply.turn}_{number}") for number, call in enumerate(reply.tool_calls)
    )
    return ReplyChoice(
        reply, Message("assistant", _until(reply.content, asked.stop), tool_calls=named), reply.reasoning
    )


def _until(text: str, stop: tuple[str, ...]) -> str:
    """Return the text before the first stop string, as the API has it. The conversation keeps the whole text."""
    return text[: min((text.find(one) for one in stop if one in text), default=len(text))]
