"""Environment SDK: a function `play(task, agent)` is an environment that a policy can be trained on.

    def play(task, agent):
        a, b = task.draw(lambda rng: (rng.randint(1, 99), rng.randint(1, 99)))
        reply = agent.say(f"What is {a} + {b}? Answer with the number only.")
        if not reply.text.strip().isdigit():
            reply = agent.say("The number only, please.")
        return float(reply.text.strip() == str(a + b))

`play` runs one episode in its own process. It may block, import any module, and crash: only that episode is affected. It
may be `async def` (`marlaas.async_environment`). A second parameter named `agents` receives all agents of the job by name:

    def team(task, agents):
        draft = agents.solver.say(task.prompt)
        verdict = agents.verifier.say(f"Right or wrong? {draft.text}")
        ...
        return {"solver": 1.0, "verifier": 0.0}

An attribute `agents` of the function or class names the agents that it needs, as in `team.agents = ("solver", "verifier")`;
a job without them is refused before it starts. A function `agents_of(task)`, as an attribute or method, names the agents
that a task calls; a call of another agent is then a fault of the environment.

A class is an environment as well. `__init__(self, **args)` runs once per sandbox: load data there. `play(self,
task, agent)` runs once per episode, on that episode's own copy of the object. A method or attribute `start_episode(task)` is
called in each episode's process before `play`: open connections, files and threads there, which episodes cannot share.

A function `score_group(task, plays)`, as an attribute or method, gives the rewards of a group's episodes by comparing them, after
all have been played. It returns a score for each `Play`, in their order.

A method or attribute `demonstrate(task)` returns a task's conversation as a list of chat messages (`Message`, or mappings
as in the chat-completions API), or such a list by agent. Supervised fine-tuning (`training.algorithm: sft`) calls it
instead of `play`, and trains the assistant's messages:

    def demonstrate(task):
        a, b = task.draw(lambda rng: (rng.randint(1, 99), rng.randint(1, 99)))
        return [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
    play.demonstrate = demonstrate

Failures that the policy causes end the episode with the rewards earned so far: too many turns (`TurnLimit`), or a
failed tool (`with agent.tool():`). Any other exception is a fault of the environment: the episode is not scored, it
is played again, and the fault is counted. This module imports the standard library and `marlaas_api` only.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from marlaas.agent_base import AgentBase, AgentsBase, Candidate, Prompt, Stop, Tool, as_tool_error
from marlaas.branches import Together
from marlaas.environment_types import (
    Message,
    Play,
    Reply,
    Rows,
    Score,
    ServiceFailed,
    Task,
    ToolCall,
    ToolError,
    TurnLimit,
    TurnRequest,
)
from marlaas.episode_state import EpisodeState
from marlaas.time_limit import time_limit
from marlaas_api.names import Split, StopReason

__all__ = [
    "Agent",
    "Agents",
    "Candidate",
    "Message",
    "Play",
    "Reply",
    "Rows",
    "Score",
    "ServiceFailed",
    "Split",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolError",
    "TurnLimit",
]


class Agents(AgentsBase["Agent"]):
    """The agents of the job by name, each with an empty conversation: `agents.solver`, or `agents["solver-2"]`."""

    def __init__(self, episode: EpisodeState) -> None:
        super().__init__(episode, Agent)

    def together(self) -> AbstractContextManager[Together]:
        """Return a context in which parts of the episode run at the same time (`Together.run`)."""
        episode: EpisodeState = self.__dict__["_episode"]
        return episode.together()


class Agent(AgentBase):
    """One policy of the job in one conversation. Each call continues after the turn before."""

    def say(self, text: str, *, max_tokens: int | None = None, stop: Stop = ()) -> Reply:
        """Append a user message and return the agent's reply of at most `max_tokens` tokens. Raises TurnLimit."""
        return self.ask(Message("user", text), max_tokens=max_tokens, stop=stop)

    def ask(
        self,
        messages: Message | Iterable[Message | Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        tools: Iterable[Tool] | None = None,
        stop: Stop = (),
    ) -> Reply:
        """Append messages (`Message`, or a mapping as in the chat-completions API) and return the agent's reply.

        `tools` replaces the functions that the chat template shows, each as `{"type": "function", "function":
        {…}}`, as the bare description, or as a Python function whose docstring and type hints describe it, as
        transformers takes it. None leaves them unchanged. `stop`: strings that end the reply, beside those of the job's
        `rollout.stop`; the reply keeps the one that was found, and its `stop_reason` is MATCH.

        Raises: TurnLimit, InvalidTurn.
        """
        return self._turn(self._asked(messages, max_tokens, tools, stop))

    def complete(self, text: str, *, max_tokens: int | None = None, stop: Stop = ()) -> Reply:
        """Append raw text without the chat template and return the agent's continuation. Raises TurnLimit."""
        return self._turn(self._raw(text, max_tokens, stop))

    def branch(self, prompt: Prompt, n: int, *, max_tokens: int | None = None) -> "list[Candidate[Agent]]":
        """Return `n` different replies to one prompt, all from the present state of this conversation, sampled at the same time.

        Give each candidate a `reward`; go on with one or several by `candidate.go_on()`. The candidates are compared with each
        other and trained with their own rewards only (agent- and turn-wise groups: AT-GRPO, arXiv 2510.11062). They count
        as one turn against `rollout.maxTurns`; within a part of `together`, as `n` turns. Beyond the limit there are none.

        Args:
            prompt: a user message's text, or messages as for `ask`.
            n: 2 to 16.

        Raises: TurnLimit, InvalidTurn.
        """
        choice, request = self._new_choice(prompt, n, max_tokens)
        if not self._episode.may_divide:
            return self._candidates(choice, self._episode.generate(self._episode.begin(request, n)))
        with self._episode.together(is_choice=True) as block:
            parts = [block.run(self._episode.turn, request) for _ in range(n)]
        return self._candidates(choice, [part.result for part in parts])

    @contextlib.contextmanager
    def tool(self, timeout_s: float | None = None) -> Iterator[None]:
        """Run a tool call of the policy: an exception inside this context becomes a ToolError.

        The policy is also charged when the process exits inside this context, when the call takes longer than
        `timeout_s`, or when the episode's time runs out. Time spent inside adds to the episode's `tool_s`.

        In the main thread the limit also interrupts a call that waits. In another thread, as in a part of `together`, it
        interrupts Python code, but a call that waits (`time.sleep`, a request) only when it returns.
        """
        with self._episode.tool_call(), as_tool_error(), time_limit(timeout_s):
            yield

    def together(self) -> AbstractContextManager[Together]:
        """Return a context in which parts of the episode run at the same time (`Together.run`)."""
        return self._episode.together()

    def _turn(self, request: TurnRequest) -> Reply:
        with self._opened(request) as turn:
            return self._continued(turn())
