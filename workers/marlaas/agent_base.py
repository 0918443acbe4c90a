"""What agents have in common, whether their turns are awaited (`marlaas.async_environment`) or not (`marlaas.environment`)."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from marlaas.chat_messages import message_of, tool_text
from marlaas.environment_types import (
    InvalidTurn,
    Message,
    Reply,
    ServiceFailed,
    ToolError,
    TurnLimit,
    TurnRequest,
    UnknownAgent,
)
from marlaas.episode_state import EpisodeState, OpenTurn
from marlaas.scores import number
from marlaas_api.errors import InvalidInput
from marlaas_api.names import MAX_STOP_TEXT, MAX_STOPS, MAX_TURNS_FACTOR
from marlaas_api.numeric import LARGEST_INTEGER

if TYPE_CHECKING:
    from marlaas.openai_server import OpenAIServer

Tool = Mapping[str, Any] | Callable[..., object]
"""A function that the policy may call: its description as a mapping, or the function itself."""
Stop = str | Iterable[str]
"""A string that ends a reply, or several."""
_FEWEST = 2
"""Candidates that can be compared."""
_OWN = "give each its own by `begin` or `fork`"

Prompt = str | Message | Iterable[Message | Mapping[str, Any]]
"""A user message's text, or messages."""


class AgentBase:
    """One policy of the job in one conversation. Each turn continues after the turn before."""

    def __init__(self, name: str, episode: EpisodeState, parent: int | None = None) -> None:
        self.name = name
        self._episode = episode
        self._parent = parent
        self._speaker: tuple[int, int] = (0, 0)
        self._speaks = False

    @property
    def reward(self) -> float:
        """Reward so far, without those of turns. It is the agent's result when `play` returns None, or when a TurnLimit or ToolError ends the episode.

        Setting it raises InvalidScore for what is not a finite number.
        """
        return self._episode.rewards[self.name]

    @reward.setter
    def reward(self, value: float) -> None:
        self._episode.reward(self.name, value)

    def reward_turn(self, reply: Reply, value: float) -> None:
        """Set the reward of one turn. It is added to the episode's reward, and `training.credit` decides which turns it trains.

        Args:
            reply: of this agent. A candidate of `branch` has a reward of its own, which is set on the candidate.
            value: 0 for turns without one.

        Raises InvalidScore for what is not a finite number, InvalidInput for a candidate.
        """
        candidates = (one for choice in self._episode.choices.values() for one in choice)
        if any(one.is_turn(self.name, reply.turn) for one in candidates):
            raise InvalidInput(
                f"agent {self.name!r}: turn {reply.turn} is a candidate: set the reward of the candidate"
            )
        self._episode.reward_turn(self.name, reply.turn, value)

    def openai(self) -> "OpenAIServer":
        """Return a context manager that serves the agents to chat-completions clients, each as the model of its name (docs/how-to/openai.md)."""
        from marlaas.openai_server import OpenAIServer  # the import takes a while, and few environments need it

        return OpenAIServer(self._episode)

    def fork(self, after: Reply | None = None) -> Self:
        """Return an independent branch of this conversation: from its end, or from after an earlier reply.

        Raises InvalidInput from the end of a conversation to which another part of a `together` block has spoken.
        """
        if after is None:
            self._require_own()
        return type(self)(self.name, self._episode, self._parent if after is None else after.turn)

    def begin(self) -> Self:
        """Return the same policy in a new, empty conversation."""
        return type(self)(self.name, self._episode)

    def _asked(
        self,
        messages: Message | Iterable[Message | Mapping[str, Any]],
        max_tokens: int | None,
        tools: Iterable[Tool] | None = None,
        stop: Stop = (),
    ) -> TurnRequest:
        given = (messages,) if isinstance(messages, Message | Mapping) else messages
        append = tuple(message_of(one) for one in given)
        if not append:
            raise InvalidTurn(f"agent {self.name!r}: `ask` needs at least one message")
        if append[-1].role == "assistant" and (append[-1].tool_calls or append[-1].reasoning):
            text = f"agent {self.name!r}: the last message has tool calls or reasoning, and a reply cannot continue it"
            raise InvalidTurn(text)
        shown = None if tools is None else tuple(tool_text(tool) for tool in tools)
        return TurnRequest(self.name, self._parent, append, self._limit(max_tokens), shown, stop=self._stops(stop))

    def _raw(self, text: str, max_tokens: int | None, stop: Stop = ()) -> TurnRequest:
        if not isinstance(text, str) or not text:
            raise InvalidTurn(f"agent {self.name!r}: `complete` needs a text that is not empty, not {text!r:.80}")
        return TurnRequest(self.name, self._parent, text, self._limit(max_tokens), stop=self._stops(stop))

    def _stops(self, stop: Stop) -> tuple[str, ...]:
        found = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
        if len(found) > MAX_STOPS or not all(isinstance(one, str) and 1 <= len(one) <= MAX_STOP_TEXT for one in found):
            text = f"agent {self.name!r}: stop is {stop!r:.80}; expected at most {MAX_STOPS} strings of 1 to {MAX_STOP_TEXT} characters"
            raise InvalidTurn(text)
        return found

    def _limit(self, max_tokens: int | None) -> int | None:
        """Return the limit of a turn as an int; whole numbers of numpy are accepted. Raises InvalidTurn."""
        try:
            found = None if max_tokens is None else int(index(max_tokens))
        except TypeError:
            found = 0
        if found is not None and not 1 <= found <= LARGEST_INTEGER:
            raise InvalidTurn(f"agent {self.name!r}: max_tokens is {max_tokens!r:.80}; expected a whole number from 1")
        return found

    @contextlib.contextmanager
    def _opened(self, request: TurnRequest) -> Iterator[OpenTurn]:
        """Begin the next turn of this conversation, which has one turn at a time."""
        self._claim()
        self._speaks = True
        try:
            (turn,) = self._episode.begin(request)
            yield turn
        finally:
            self._speaks = False

    def _continued(self, reply: Reply) -> Reply:
        self._parent = reply.turn
        return reply

    def _new_choice(self, prompt: Prompt, n: int, max_tokens: int | None) -> tuple[int, TurnRequest]:
        """Return the number of a new choice, and the request for each of its `n` candidates. Raises InvalidTurn."""
        if not _FEWEST <= n <= MAX_TURNS_FACTOR:
            raise InvalidTurn(
                f"agent {self.name!r}: `branch` gives {_FEWEST} to {MAX_TURNS_FACTOR} candidates, not {n}"
            )
        self._claim()
        request = self._asked(Message("user", prompt) if isinstance(prompt, str) else prompt, max_tokens)
        number = self._episode.begin_choice()
        return number, replace(request, choice=number)

    def _candidates(self, choice: int, replies: Iterable[Reply]) -> "list[Candidate[Self]]":
        candidates = [Candidate(self, reply) for reply in replies]
        self._episode.choices[choice] = candidates
        return candidates

    def _claim(self) -> None:
        """Note that the caller's part speaks to this conversation. Raises InvalidInput if another one speaks, or has in this block."""
        self._require_own()
        if self._speaks:
            raise InvalidInput(f"agent {self.name!r}: two turns of one conversation at the same time; {_OWN}")
        branch = self._episode.branch()
        if branch is not None:
            self._speaker = (branch.block, id(branch))

    def _require_own(self) -> None:
        branch, before = self._episode.branch(), self._speaker
        if branch is not None and branch.block and before[0] == branch.block and before[1] != id(branch):
            raise InvalidInput(
                f"agent {self.name!r}: two parts that run at the same time speak to one conversation; {_OWN}"
            )


A = TypeVar("A", bound=AgentBase)


class AgentsBase(dict[str, A]):
    """The agents of the job by name, each with an empty conversation: `agents.solver`, or `agents["solver-2"]`."""

    def __init__(self, episode: EpisodeState, kind: type[A]) -> None:
        super().__init__((name, kind(name, episode)) for name in episode.rewards)
        self.__dict__["_episode"] = episode

    def __getattr__(self, name: str) -> A:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __missing__(self, name: str) -> A:
        raise UnknownAgent(f"the job has no agent {name!r}; its agents are {', '.join(self)}")


class Candidate(Generic[A]):
    """One of several replies from the same state (`Agent.branch`).

    Attributes:
        reply: the reply.
    """

    def __init__(self, agent: A, reply: Reply) -> None:
        self.reply = reply
        self._reward = 0.0
        self._agent = agent

    @property
    def reward(self) -> float:
        """Reward of this candidate; 0 unless it is set. Setting it raises InvalidScore for what is not a finite number."""
        return self._reward

    @reward.setter
    def reward(self, value: float) -> None:
        self._reward = number(value, "the reward of a candidate")
        self._agent._episode.is_rewarded = True

    def is_turn(self, agent: str, turn: int) -> bool:
        """Return whether this is a certain turn of an agent."""
        return (self._agent.name, self.reply.turn) == (agent, turn)

    @property
    def text(self) -> str:
        """Text of the reply."""
        return self.reply.text

    def go_on(self) -> A:
        """Return the agent in the conversation that ends with this candidate."""
        return self._agent.fork(self.reply)


@contextlib.contextmanager
def as_tool_error() -> Iterator[None]:
    """Turn an exception in a tool call of the policy into a ToolError. The SDK's own errors, and failed services, are no fault of the policy."""
    try:
        yield
    except (TurnLimit, ToolError, InvalidInput, ServiceFailed):
        raise
    except (Exception, SystemExit) as error:
        raise ToolError(f"{type(error).__name__}: {error}") from error
