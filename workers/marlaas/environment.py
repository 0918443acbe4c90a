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
a job without them is refused before it starts. A function `agents_of(task)`, as an attribute or method, names the agents
that a task calls; a call of another agent is then a fault of the environment.

A class is an environment as well. `__init__(self, **args)` runs once per sandbox: load data there. `play(self,
task, agent)` runs once per episode, on that episode's own copy of the object.

Failures that the policy causes end the episode with the rewards earned so far: too many turns (`TurnLimit`), or a
failed tool (`with agent.tool():`). Any other exception is a fault of the environment: the episode is not scored, it
is played again, and the fault is counted. This module imports the standard library and `marlaas_api` only.
"""

import contextlib
import json
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from marlaas.branches import Together
from marlaas.environment_types import Message, Reply, Score, Task, ToolCall, ToolError, TurnLimit, TurnRequest
from marlaas.episode_state import EpisodeState
from marlaas_api.errors import InvalidInput
from marlaas_api.names import MAX_TURNS_FACTOR, Split, StopReason

if TYPE_CHECKING:
    from marlaas.openai_server import OpenAIServer

__all__ = [
    "Agent",
    "Agents",
    "Candidate",
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

_FEWEST = 2
"""Candidates that can be compared."""


class Agents(dict[str, "Agent"]):
    """The agents of the job by name, each with an empty conversation: `agents.solver`, or `agents["solver-2"]`."""

    def __init__(self, episode: EpisodeState) -> None:
        super().__init__((name, Agent(name, episode)) for name in episode.rewards)
        self.__dict__["_episode"] = episode

    def together(self) -> AbstractContextManager[Together]:
        """Return a context in which parts of the episode run at the same time (`Together.run`)."""
        episode: EpisodeState = self.__dict__["_episode"]
        return episode.together()

    def __getattr__(self, name: str) -> "Agent":
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def __missing__(self, name: str) -> "Agent":
        raise InvalidInput(f"the job has no agent {name!r}; its agents are {', '.join(self)}")


class Agent:
    """One policy of the job in one conversation. Each call continues after the turn before."""

    def __init__(self, name: str, episode: EpisodeState, parent: int | None = None, choice: int | None = None) -> None:
        self.name = name
        self._episode = episode
        self._parent = parent
        self._choice = choice
        self._speaker: tuple[int, int] = (0, 0)

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
        """Return an independent branch of this conversation: from its end, or from after an earlier reply.

        Raises InvalidInput from the end of a conversation to which another part of a `together` block has spoken.
        """
        if after is None:
            self._require_own()
        return Agent(self.name, self._episode, self._parent if after is None else after.turn)

    def branch(
        self, prompt: str | Message | Iterable[Message | Mapping[str, Any]], n: int, *, max_tokens: int | None = None
    ) -> "list[Candidate]":
        """Return `n` different replies to one prompt, all from the present state of this conversation.

        Give each candidate a `reward`; go on with one or several by `candidate.go_on()`. The candidates are compared with each
        other and trained with their own rewards only (agent- and turn-wise groups: AT-GRPO, arXiv 2510.11062). They count
        as one turn against `rollout.maxTurns`, and are sampled at the same time, except within a part of `together`, where
        they are sampled one after another and count as `n` turns.

        Args:
            prompt: a user message's text, or messages as for `ask`.
            n: 2 to 16.

        Raises: TurnLimit, ValueError.
        """
        if not _FEWEST <= n <= MAX_TURNS_FACTOR:
            raise ValueError(f"agent {self.name!r}: `branch` gives {_FEWEST} to {MAX_TURNS_FACTOR} candidates, not {n}")
        self._claim()
        given = Message("user", prompt) if isinstance(prompt, str) else prompt
        messages = given if isinstance(given, Message) else tuple(given)
        number = self._episode.begin_choice()
        agents = [Agent(self.name, self._episode, self._parent, number) for _ in range(n)]
        if self._episode.may_divide:
            with self._episode.together(is_choice=True) as at_once:
                parts = [at_once.run(partial(agent.ask, messages, max_tokens=max_tokens)) for agent in agents]
            replies: list[Reply] = [part.result for part in parts]
        else:
            replies = [agent.ask(messages, max_tokens=max_tokens) for agent in agents]
        candidates = [Candidate(agent, reply) for agent, reply in zip(agents, replies, strict=True)]
        self._episode.choices[number] = candidates
        return candidates

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

    def together(self) -> AbstractContextManager[Together]:
        """Return a context in which parts of the episode run at the same time (`Together.run`)."""
        return self._episode.together()

    def _turn(self, request: TurnRequest) -> Reply:
        self._claim()
        reply = self._episode.turn(replace(request, choice=self._choice))
        self._parent, self._choice = reply.turn, None
        return reply

    def _claim(self) -> None:
        """Note that the calling thread's part speaks to this conversation. Raises InvalidInput if another part has."""
        self._require_own()
        branch = self._episode.branch()
        if branch is not None:
            self._speaker = (branch.block, id(branch))

    def _require_own(self) -> None:
        branch, before = self._episode.branch(), self._speaker
        if branch is not None and branch.block and before[0] == branch.block and before[1] != id(branch):
            raise InvalidInput(
                f"agent {self.name!r}: two parts that run at the same time speak to one conversation; give each its own by `begin` or `fork`"
            )


class Candidate:
    """One of several replies from the same state (`Agent.branch`).

    Attributes:
        reply: the reply.
        reward: of this candidate; 0 unless it is set.
    """

    def __init__(self, agent: Agent, reply: Reply) -> None:
        self.reply = reply
        self.reward = 0.0
        self._agent = agent

    @property
    def text(self) -> str:
        """Text of the reply."""
        return self.reply.text

    def go_on(self) -> Agent:
        """Return the agent in the conversation that ends with this candidate."""
        return self._agent.fork(self.reply)


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
