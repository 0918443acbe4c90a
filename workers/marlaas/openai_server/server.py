"""OpenAI server of an episode: converts requests to turns of the episode's agents, and replies to completions."""

import dataclasses
import secrets
import threading
import time
from types import TracebackType
from typing import Self

from marlaas.environment import EpisodeState, Message, Reply, TurnLimit, TurnRequest
from marlaas.openai_server.answers import Answer, ReplyChoice
from marlaas.openai_server.calls import find_calls, tool_names
from marlaas.openai_server.chat_request import TURN_LIMIT, ChatRequest, RequestError, mentions_turn_limit, read
from marlaas.openai_server.conversations import Conversations, ConversationState, Found
from marlaas.openai_server.loopback import Loopback


class OpenAIServer:
    """Context manager that serves chat completions for the agents of one episode.

    A request beyond the turn limit is answered with 403 and code `turn_limit`. If that error, or an exception that
    wraps it, leaves the context, it is replaced by TurnLimit, which ends the episode, scored.
    """

    def __init__(self, episode: EpisodeState) -> None:
        self.api_key = f"sk-marlaas-{secrets.token_urlsafe(24)}"
        self._episode = episode
        self._conversations = Conversations()
        self._limit: TurnLimit | None = None
        self._loopback: Loopback | None = None
        self._one_at_a_time = threading.Lock()

    @property
    def base_url(self) -> str:
        """Base URL for a client. Raises RuntimeError outside of the context."""
        if self._loopback is None:
            raise RuntimeError("the door is closed: use it as `with agent.openai() as door:`")
        return f"http://127.0.0.1:{self._loopback.port}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that configure a client in this process or in a child process."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}

    @property
    def models(self) -> tuple[str, ...]:
        """The agents' names."""
        return tuple(self._episode.rewards)

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
            text = f"there is no model {asked.model!r}; the job's agents are {', '.join(self.models)}"
            raise RequestError(text, param="model", status=404, code="model_not_found")
        with self._one_at_a_time:
            return asked, Answer(asked.model, int(time.time()), self._choices(asked))

    def _choices(self, asked: ChatRequest) -> list[ReplyChoice]:
        found = self._conversations.find(asked.model, asked.messages)
        try:
            return [self._choice(asked, found) for _ in range(asked.num_choices)]
        except TurnLimit as limit:
            self._limit = limit
            raise RequestError(str(limit), status=403, code=TURN_LIMIT) from limit

    def _choice(self, asked: ChatRequest, found: Found) -> ReplyChoice:
        tools = None if asked.tools == found.place.tools else asked.tools
        reply = self._episode.turn(TurnRequest(asked.model, found.place.turn, found.append, asked.max_tokens, tools))
        message = _message(asked, reply)
        self._conversations.note(asked.model, found, message, ConversationState(reply.turn, asked.tools))
        return ReplyChoice(reply, message)


def _message(asked: ChatRequest, reply: Reply) -> Message:
    """Return the reply as the client sees it.

    The ids of calls contain the turn, so a client that repeats them identifies the conversation.
    """
    if not asked.calls:
        return Message("assistant", reply.text)
    text, calls = find_calls(reply.text, tool_names(asked.tools))
    named = tuple(dataclasses.replace(call, id=f"call_{reply.turn}_{number}") for number, call in enumerate(calls))
    return Message("assistant", text, tool_calls=named)
