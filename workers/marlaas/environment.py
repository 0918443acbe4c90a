"""Environment SDK: a function `play(task, agent)` is an environment that a policy can be trained on.

    def play(task, agent):
        a, b = task.draw(lambda rng: (rng.randint(1, 99), rng.randint(1, 99)))
        reply = agent.say(f"What is {a} + {b}? Answer with the number only.")
        if not reply.text.strip().isdigit():
            reply = agent.say("The number only, please.")
        return float(reply.text.strip() == str(a + b))

`play` runs one episode synchronously in its own process. It may block, import any module, and crash: only that
episode is affected. A second parameter named `agents` receives all agents of the job by name:

    def team(task, agents):
        draft = agents.solver.say(task.prompt)
        verdict = agents.verifier.say(f"Right or wrong? {draft.text}")
        ...
        return {"solver": 1.0, "verifier": 0.0}

An attribute `agents` of the function or class names the agents that it needs, as in `team.agents = ("solver", "verifier")`;
a job without them is refused before it starts.

A class is an environment as well. `__init__(self, **args)` runs once per sandbox: load data there. `play(self,
task, agent)` runs once per episode, on that episode's own copy of the object.

Failures that the policy causes end the episode with the rewards earned so far: too many turns (`TurnLimit`), or a
failed tool (`with agent.tool():`). Any other exception is a fault of the environment: the episode is not scored, it
is played again, and the fault is counted. This module imports the standard library and `marlaas_api` only.
"""

import contextlib
import json
import random
import signal
import time
from _thread import allocate_lock  # without `threading`, a fork copies a hundred pages less
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from marlaas_api.errors import InvalidInput
from marlaas_api.names import Split, StopReason, derive_seed, split_of

if TYPE_CHECKING:
    from marlaas.openai_server import OpenAIServer

__all__ = [
    "Agent",
    "Agents",
    "Message",
    "Reply",
    "Score",
    "Split",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolError",
    "TurnLimit",
]

_T = TypeVar("_T")
_ROLES = ("system", "user", "assistant", "tool")
_MAX_DRAWS = 1000


class TurnLimit(Exception):
    """The agent has used all turns that the job allows (`rollout.maxTurns`). If `play` lets it pass, the episode ends and is scored."""


class ToolError(Exception):
    """A tool failed because of the policy's input. If `play` does not catch it, the episode ends and is scored."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call in a hand-written assistant message (not a generated one). `arguments` is the JSON text of an object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """Chat message of role system, user, assistant or tool. `tool_call_id`: the call that a tool message answers; `name`: the tool's."""

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
    """One turn of an agent. Pass it to `Agent.fork` to branch after it; `num_prompt_tokens` is the length of the prompt."""

    text: str
    stop_reason: StopReason = StopReason.STOP
    num_tokens: int = 0
    turn: int = 0
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """Result of an episode: a reward for all agents or by agent name, and metrics to record. Values are between -1e30 and 1e30."""

    reward: float | Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """The prompt instance to play. All episodes of a group get the same task and must draw the same content from it."""

    split: Split
    index: int
    seed: int

    @cached_property
    def rng(self) -> random.Random:
        """Random generator that depends only on the task. An environment must use no other randomness."""
        return random.Random(derive_seed(self.seed, self.split, self.index))

    def draw(self, generate: Callable[[random.Random], _T], text: Callable[[_T], str] = repr) -> _T:
        """Generate content that belongs to this split, so that held-out content is never trained on, whatever the seeds.

        A hash of the content's text assigns it to a split; one in eight is held out. `generate` is called until its
        content falls into this split.

        Raises:
            InvalidInput: no content of this split in 1000 draws.
        """
        for _ in range(_MAX_DRAWS):
            content = generate(self.rng)
            if split_of(text(content)) == self.split:
                return content
        raise InvalidInput(f"no {self.split} task in {_MAX_DRAWS} draws: the environment has too few different tasks")


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Request for one turn of an agent: messages or raw text, appended after turn `parent` (None: a new conversation).

    `tools` holds the JSON text of each function that the chat template shows. None keeps those of the turn before.
    """

    agent: str
    parent: int | None
    append: tuple[Message, ...] | str
    max_tokens: int | None = None
    tools: tuple[str, ...] | None = None


class Channel(Protocol):
    """Source of an agent's replies: the sandbox's supervisor, a person, or a script (`marlaas.envs.scripted`)."""

    def turn(self, request: TurnRequest) -> Reply:
        """Generate a reply. Raises TurnLimit."""
        ...

    def tool(self, is_open: bool, rewards: Mapping[str, float]) -> None:
        """Record that a tool call begins or ends, with each agent's reward so far."""
        ...


class Agents(dict[str, "Agent"]):
    """The agents of the job by name, each with an empty conversation: `agents.solver`, or `agents["solver-2"]`."""

    def __getattr__(self, name: str) -> "Agent":
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __missing__(self, name: str) -> "Agent":
        raise InvalidInput(f"the job has no agent {name!r}; its agents are {', '.join(self)}")


class EpisodeState:
    """State that the agents of an episode share: channel, sampling temperature, rewards so far, and seconds spent in tools.

    `tool_s` excludes the time that turns within a tool call take.
    """

    def __init__(self, names: Iterable[str], channel: Channel, temperature: float = 1.0) -> None:
        self.rewards = dict.fromkeys(names, 0.0)
        self.temperature = temperature
        self.tool_s = 0.0
        self._channel = channel
        self._waited_s = 0.0
        self._is_in_tool = False
        self._lock = allocate_lock()

    def agents(self) -> Agents:
        """Return all agents by name, each with an empty conversation."""
        return Agents((name, Agent(name, self)) for name in self.rewards)

    def turn(self, request: TurnRequest) -> Reply:
        """Request a turn from the channel. Turns of an episode run one at a time, so that they have an order. Raises TurnLimit."""
        with self._lock:
            started = time.monotonic()
            try:
                return self._channel.turn(request)
            finally:
                self._waited_s += time.monotonic() - started

    @contextlib.contextmanager
    def tool_call(self) -> Iterator[None]:
        """Measure the time of a tool call and report its begin and end to the channel. Nested calls count once."""
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
    """One policy of the job in one conversation. Each call continues after the turn before."""

    def __init__(self, name: str, episode: EpisodeState, parent: int | None = None) -> None:
        self.name = name
        self._episode = episode
        self._parent = parent

    @property
    def reward(self) -> float:
        """Reward so far. It is the agent's result when `play` returns None, or when a TurnLimit or ToolError ends the episode."""
        return self._episode.rewards[self.name]

    @reward.setter
    def reward(self, value: float) -> None:
        self._episode.rewards[self.name] = value

    def say(self, text: str, *, max_tokens: int | None = None) -> Reply:
        """Append a user message and return the agent's reply of at most `max_tokens` tokens. Raises TurnLimit."""
        return self.ask(Message("user", text), max_tokens=max_tokens)

    def ask(
        self,
        messages: Message | Iterable[Message | Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        tools: Iterable[Mapping[str, Any]] | None = None,
    ) -> Reply:
        """Append messages (`Message`, or a dict with role and content) and return the agent's reply. Raises TurnLimit.

        `tools` replaces the functions that the chat template shows, each as `{"type": "function", "function":
        {…}}`. None leaves them unchanged.
        """
        given = (messages,) if isinstance(messages, Message) else messages
        append = tuple(one if isinstance(one, Message) else Message(**one) for one in given)
        if not append:
            raise ValueError(f"agent {self.name!r}: `ask` needs at least one message")
        shown = None if tools is None else tuple(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return self._turn(TurnRequest(self.name, self._parent, append, max_tokens, shown))

    def complete(self, text: str, *, max_tokens: int | None = None) -> Reply:
        """Append raw text without the chat template and return the agent's continuation. Raises TurnLimit."""
        if not text:
            raise ValueError(f"agent {self.name!r}: `complete` needs a text that is not empty")
        return self._turn(TurnRequest(self.name, self._parent, text, max_tokens))

    def openai(self) -> "OpenAIServer":
        """Return a context manager that serves the agents to chat-completions clients, each as the model of its name (docs/openai.md)."""
        from marlaas.openai_server import OpenAIServer  # the import takes a while, and few environments need it

        return OpenAIServer(self._episode)

    def fork(self, after: Reply | None = None) -> "Agent":
        """Return an independent branch of this conversation: from its end, or from after an earlier reply."""
        return Agent(self.name, self._episode, self._parent if after is None else after.turn)

    def begin(self) -> "Agent":
        """Return the same policy in a new, empty conversation."""
        return Agent(self.name, self._episode)

    @contextlib.contextmanager
    def tool(self, timeout_s: float | None = None) -> Iterator[None]:
        """Run a tool call of the policy: an exception inside this context becomes a ToolError.

        The policy is also charged when the process exits inside this context, when the call takes longer than
        `timeout_s` (main thread only), or when the episode's time runs out. Time spent inside adds to the episode's
        `tool_s`.
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


@contextlib.contextmanager
def _alarm(timeout_s: float | None) -> Iterator[None]:
    """Raise TimeoutError in the main thread after `timeout_s` seconds. None sets no limit."""
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
