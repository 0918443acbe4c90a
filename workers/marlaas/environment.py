"""The environment SDK: write a function, and a policy can be trained on it.

    def play(task, agent):
        a, b = task.draw(lambda rng: (rng.randint(1, 99), rng.randint(1, 99)))
        reply = agent.say(f"What is {a} + {b}? Answer with the number only.")
        if not reply.text.strip().isdigit():
            reply = agent.say("The number only, please.")
        return float(reply.text.strip() == str(a + b))

An environment plays one episode, synchronously, in a process of its own: it may block, import what it likes, and crash;
only its own episode suffers. A class does as well: `__init__(self, **args)` runs once per sandbox (load data there; every
episode gets its own copy of the object), `play(self, task, agent)` once per episode. A second parameter called `agents` is
given all agents of the job by name.

What the policy caused is scored, what it did not cause never is: running out of turns (`TurnLimit`) or breaking its own tool
(`with agent.tool():`) ends the episode with the rewards earned so far; any other exception is a fault of the environment,
which is played again and counted. This module imports the standard library only.
"""

import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from marlaas_api.errors import InvalidInput
from marlaas_api.names import Split, StopReason, derive_seed, split_of

if TYPE_CHECKING:
    from marlaas.openai_server import OpenAIServer

__all__ = ["Agent", "Message", "Reply", "Score", "Split", "StopReason", "Task", "ToolCall", "ToolError", "TurnLimit"]

_T = TypeVar("_T")
_ROLES = ("system", "user", "assistant", "tool")
_MAX_DRAWS = 1000


class TurnLimit(Exception):
    """The agent has had all turns that the job allows (`rollout.maxTurns`). Uncaught, it ends the episode, scored."""


class ToolError(Exception):
    """A tool failed because of what the policy asked of it. Uncaught, it ends the episode, scored."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an assistant's message that was written, not generated; arguments: the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; role is system, user, assistant or tool, `name` is a tool's, `tool_call_id` the call that it answers."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"a message's role is one of {', '.join(_ROLES)}, not {self.role!r}")
        if not isinstance(self.content, str):
            raise TypeError(f"a message's content is text, not {type(self.content).__name__}")


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of an agent. `turn` names it for `Agent.fork`; num_prompt_tokens: what it was generated from."""

    text: str
    stop_reason: StopReason = StopReason.STOP
    num_tokens: int = 0
    turn: int = 0
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """What an episode was worth: one reward for all agents or one each by name, and metrics for the job's record. Each from -1e30 to 1e30."""

    reward: float | Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """What to play. All episodes of a group have the same task, and must find the same content in it."""

    split: Split
    index: int
    seed: int

    @cached_property
    def rng(self) -> random.Random:
        """Randomness that depends on the task alone; the only kind that an environment should use."""
        return random.Random(derive_seed(self.seed, self.split, self.index))

    def draw(self, generate: Callable[[random.Random], _T], text: Callable[[_T], str] = repr) -> _T:
        """Generate content that belongs to this split: what is held out is never trained on, whatever the seeds.

        A hash of the content's text decides (one in eight is held out), so `generate` is called until it fits. Raises
        InvalidInput when it never does.
        """
        for _ in range(_MAX_DRAWS):
            content = generate(self.rng)
            if split_of(text(content)) == self.split:
                return content
        raise InvalidInput(f"no {self.split} task in {_MAX_DRAWS} draws: the environment has too few different tasks")


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an agent is asked: go on after turn `parent` (None: a new conversation), with messages or raw text appended.

    tools: the JSON text of each function that the chat template shows; None: as before.
    """

    agent: str
    parent: int | None
    append: tuple[Message, ...] | str
    max_tokens: int | None = None
    tools: tuple[str, ...] | None = None


class Channel(Protocol):
    """Who answers for the agents: the sandbox's supervisor, a person, or a script (`marlaas.envs.scripted`)."""

    def turn(self, request: TurnRequest) -> Reply:
        """Generate. Raises TurnLimit."""
        ...

    def tool(self, is_open: bool, rewards: Mapping[str, float]) -> None:
        """Hear that a tool call begins or ends, and what has been earned so far."""
        ...


class EpisodeState:
    """What an episode's agents share: the channel, the job's temperature, rewards so far, and seconds in tools (not in turns)."""

    def __init__(self, names: Iterable[str], channel: Channel, temperature: float = 1.0) -> None:
        self.rewards = dict.fromkeys(names, 0.0)
        self.temperature = temperature
        self.tool_s = 0.0
        self._channel = channel
        self._waited_s = 0.0
        self._is_in_tool = False
        self._lock = threading.Lock()

    def agents(self) -> dict[str, "Agent"]:
        """Return every agent with an empty conversation."""
        return {name: Agent(name, self) for name in self.rewards}

    def turn(self, request: TurnRequest) -> Reply:
        """Ask for a turn; one at a time, so that an episode's turns have an order. Raises TurnLimit."""
        with self._lock:
            started = time.monotonic()
            try:
                return self._channel.turn(request)
            finally:
                self._waited_s += time.monotonic() - started

    @contextlib.contextmanager
    def tool_call(self) -> Iterator[None]:
        """Time a tool call, and let the channel know of it. Calls within calls count once."""
        if self._is_in_tool:
            yield
            return
        self._is_in_tool = True
        self._channel.tool(True, self.rewards)
        started, waited_s = time.monotonic(), self._waited_s
        try:
            yield
        finally:
            self.tool_s += max(0.0, time.monotonic() - started - (self._waited_s - waited_s))
            self._is_in_tool = False
            self._channel.tool(False, self.rewards)


class Agent:
    """One policy of the job, in one conversation: every call goes on where the last one ended."""

    def __init__(self, name: str, episode: EpisodeState, parent: int | None = None) -> None:
        self.name = name
        self._episode = episode
        self._parent = parent

    @property
    def reward(self) -> float:
        """What the agent has earned so far; it counts when `play` returns None, and when turns or a tool end the episode."""
        return self._episode.rewards[self.name]

    @reward.setter
    def reward(self, value: float) -> None:
        self._episode.rewards[self.name] = value

    def say(self, text: str, *, max_tokens: int | None = None) -> Reply:
        """Append a user message and let the agent reply, with at most `max_tokens` tokens. Raises TurnLimit."""
        return self.ask(Message("user", text), max_tokens=max_tokens)

    def ask(
        self,
        messages: Message | Iterable[Message | Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        tools: Iterable[Mapping[str, Any]] | None = None,
    ) -> Reply:
        """Append messages (`Message` or a dict with role and content) and let the agent reply. Raises TurnLimit.

        tools: what the chat template shows from now on, as `{"type": "function", "function": {…}}`; None: as before.
        """
        append = (messages,) if isinstance(messages, Message) else tuple(map(_message, messages))
        if not append:
            raise ValueError(f"agent {self.name!r} was asked without a message")
        shown = None if tools is None else tuple(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return self._turn(TurnRequest(self.name, self._parent, append, max_tokens, shown))

    def complete(self, text: str, *, max_tokens: int | None = None) -> Reply:
        """Append raw text, without the chat template, and let the agent go on from there. Raises TurnLimit."""
        if not text:
            raise ValueError(f"agent {self.name!r} was asked to complete an empty text")
        return self._turn(TurnRequest(self.name, self._parent, text, max_tokens))

    def openai(self) -> "OpenAIServer":
        """Serve the episode's agents, as models of their names, to chat-completions clients within a context (docs/openai.md)."""
        from marlaas.openai_server import OpenAIServer

        return OpenAIServer(self._episode)

    def fork(self, after: Reply | None = None) -> "Agent":
        """Return a second branch of this conversation, from here or from after an earlier reply; both go on alone."""
        return Agent(self.name, self._episode, self._parent if after is None else after.turn)

    def begin(self) -> "Agent":
        """Return the same policy in a new, empty conversation."""
        return Agent(self.name, self._episode)

    @contextlib.contextmanager
    def tool(self, timeout_s: float | None = None) -> Iterator[None]:
        """Run what the policy asked for: an exception in here is the policy's doing and becomes a ToolError.

        The same holds if the process dies in here, or if it takes longer than `timeout_s` (main thread only) or the episode's
        time. Time spent in here is the episode's `tool_s`.
        """
        with self._episode.tool_call():
            try:
                with _alarm(timeout_s):
                    yield
            except (TurnLimit, ToolError):
                raise
            except (Exception, SystemExit) as error:
                raise ToolError(f"{type(error).__name__}: {error}") from error

    def _turn(self, request: TurnRequest) -> Reply:
        reply = self._episode.turn(request)
        self._parent = reply.turn
        return reply


def _message(message: Message | Mapping[str, Any]) -> Message:
    return message if isinstance(message, Message) else Message(**message)


@contextlib.contextmanager
def _alarm(timeout_s: float | None) -> Iterator[None]:
    """Raise TimeoutError in the main thread after the time; None never does."""
    if timeout_s is None:
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the tool took longer than {timeout_s:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
