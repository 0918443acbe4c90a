"""The supervisor's side of one episode: validates the child's messages, answers its turns, records them.

A child runs foreign code, so its messages are untrusted until `parse`, and the ledger does not depend on its
claims. Time in which a turn waits or is generated does not count against the episode's timeout.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from marlaas_api.messages import (
    Ending,
    FaultClass,
    GenerateReply,
    GenerateRequest,
    JobDocument,
    StopReason,
    TaskMessage,
)
from marlaas_worker.sandbox.channel import BadFrame, encode_frame, read_frame
from marlaas_worker.sandbox.child_messages import (
    CHILD_MESSAGES,
    ChildMessage,
    FaultMessage,
    ScoreMessage,
    ToolMessage,
    TurnMessage,
)
from marlaas_worker.sandbox.faults import Fault, fault_of_exit
from marlaas_worker.sandbox.server import Child, Ended
from marlaas_worker.sandbox.turns import LEASE_S, TurnClient, TurnFailed, TurnTooLong, TurnWaited

_EXIT_GRACE_S = 0.5
"""Time for the exit of a child to be reported after its connection, or for its last message after its exit."""
_T = TypeVar("_T")


class BadChildMessage(Exception):
    """A child sent a malformed message, or one that is not valid in this state."""


def parse(body: bytes, agents: tuple[str, ...]) -> ChildMessage:
    """Validate one message of a child. agents: the job's agents. Raises BadChildMessage."""
    try:
        message = CHILD_MESSAGES.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise BadChildMessage(f"{where}: {first['msg']}" if where else str(first["msg"])) from error
    if isinstance(message, TurnMessage) and message.agent not in agents:
        raise BadChildMessage(f"a turn of agent {message.agent!r}, but the job's agents are {', '.join(agents)}")
    if isinstance(message, ToolMessage | ScoreMessage) and set(message.rewards) != set(agents):
        found = ", ".join(message.rewards) or "no agent"
        raise BadChildMessage(f"rewards for {found}; expected {', '.join(agents)}")
    return message


@dataclass(slots=True)
class TurnLedger:
    """The turns of one play, numbered from 0 over all agents.

    tool_rewards: rewards so far, while a tool call is open; else None.
    """

    agents: tuple[str, ...]
    max_turns: int
    tool_rewards: dict[str, float] | None = None
    _turns: list[tuple[str, int | None]] = field(default_factory=list)
    _last_stop: StopReason | None = None
    _was_limited: bool = False

    @property
    def num_turns(self) -> int:
        """Number of generated turns."""
        return len(self._turns)

    def admits(self, asked: TurnMessage) -> bool:
        """Return whether the agent has a turn left.

        Raises:
            BadChildMessage: the parent turn does not exist or belongs to another agent.
        """
        if asked.parent is not None and (
            asked.parent >= len(self._turns) or self._turns[asked.parent][0] != asked.agent
        ):
            raise BadChildMessage(f"agent {asked.agent!r} continues turn {asked.parent}, which is not one of its turns")
        has_turn = sum(agent == asked.agent for agent, _ in self._turns) < self.max_turns
        self._was_limited |= not has_turn
        return has_turn

    def note(self, asked: TurnMessage, stop: StopReason) -> None:
        """Record a generated turn."""
        self._turns.append((asked.agent, asked.parent))
        self._last_stop = stop

    def leaves(self) -> dict[str, tuple[int, ...]]:
        """Return, per agent with turns, its turns that are no other turn's parent."""
        parents = {parent for _, parent in self._turns}
        found: dict[str, tuple[int, ...]] = {}
        for agent in self.agents:
            leaves = tuple(n for n, (taker, _) in enumerate(self._turns) if taker == agent and n not in parents)
            if leaves:
                found[agent] = leaves
        return found

    def ending(self, score: ScoreMessage) -> Ending:
        """Return the episode's ending: tool error, turn limit, token limit, or completed."""
        reported = Ending(score.ending)
        if reported is not Ending.COMPLETED:
            return reported
        if self._was_limited:
            return Ending.MAX_TURNS
        if self._last_stop in (StopReason.LENGTH, StopReason.CONTEXT):
            return Ending.MAX_TOKENS
        return reported


class _ChildEnded(Exception):
    def __init__(self, ended: Ended) -> None:
        super().__init__()
        self.ended = ended


class ChildSession:
    """One play of an episode: answers the child's turns until it sends a score.

    tool_s: seconds in tool calls so far, as the supervisor measures them.
    """

    def __init__(self, document: JobDocument, turns: TurnClient, task: TaskMessage, member: int, episode: str) -> None:
        self._spec = document.spec
        self._turns = turns
        self._task = task
        self._member = member
        self._episode = episode
        self.ledger = TurnLedger(tuple(agent.name for agent in self._spec.agents), self._spec.rollout.max_turns)
        self._left_s = self._spec.environment.episode_timeout_seconds
        self.tool_s = 0.0

    async def run(self, child: Child) -> ScoreMessage:
        """Start the episode in a child and return its score. Raises Fault."""
        task, agents = self._task, self.ledger.agents
        start = {"split": task.split, "index": task.index, "seed": task.seed}
        await _send(child, {**start, "agents": agents, "temperature": self._spec.rollout.temperature})
        close_late = partial(_close_late, child)
        child.ended.add_done_callback(close_late)
        while True:
            match message := await self._next_message(child):
                case TurnMessage():
                    await _send(child, await self._play_turn(child, message))
                case ToolMessage():
                    self.ledger.tool_rewards = message.rewards if message.is_open else None
                case FaultMessage():
                    raise Fault(FaultClass.ENV, message.text)
                case ScoreMessage():
                    child.ended.remove_done_callback(close_late)
                    await asyncio.wait({child.ended}, timeout=_EXIT_GRACE_S)
                    return message

    async def _next_message(self, child: Child) -> ChildMessage:
        """Wait for the child's next message within the episode's time, which counts as the environment's."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, self._left_s)):
                body = await read_frame(child.reader)
            return parse(body, self.ledger.agents)
        except TimeoutError:
            await child.print_stack()
            limit_s = self._spec.environment.episode_timeout_seconds
            text = f"the environment took longer than {limit_s:g} s, turns not counted"
            raise Fault(FaultClass.ENV, f"{text} (environment.episodeTimeoutSeconds)", by_policy=True) from None
        except (BadChildMessage, BadFrame) as error:
            raise Fault(FaultClass.ENV, f"the environment sent an invalid message: {error}") from error
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._disconnected(child) from None
        finally:
            self._count_time(time.monotonic() - started)

    def _count_time(self, seconds: float) -> None:
        self._left_s -= seconds
        if self.ledger.tool_rewards is not None:
            self.tool_s += seconds

    async def _disconnected(self, child: Child) -> Fault:
        await asyncio.wait({child.ended}, timeout=_EXIT_GRACE_S)
        if child.ended.done():
            return fault_of_exit(child.ended.result(), self._spec.environment.memory)
        return Fault(FaultClass.ENV, "the environment closed its connection to the supervisor", by_policy=True)

    async def _play_turn(self, child: Child, asked: TurnMessage) -> dict[str, Any]:
        """Have a turn generated and return the answer for the child. Raises Fault."""
        try:
            if not self.ledger.admits(asked):
                text = f"agent {asked.agent!r} has had its {self.ledger.max_turns} turns (rollout.maxTurns)"
                return {"kind": "limit", "text": text}
            timeout_s = self._spec.environment.turn_timeout_seconds
            reply = await _unless_ended(child, self._turns.generate(self._request(asked), timeout_s))
        except (BadChildMessage, TurnTooLong) as error:
            raise Fault(FaultClass.ENV, str(error)) from error
        except TurnFailed as error:
            raise Fault(FaultClass.INFRA, str(error)) from error
        except TurnWaited as error:
            raise Fault(FaultClass.WAITED, str(error)) from error
        except _ChildEnded as end:
            raise fault_of_exit(end.ended, self._spec.environment.memory) from None
        number, stop = self.ledger.num_turns, reply.stop_reason or StopReason.STOP
        self.ledger.note(asked, stop)
        return _answer(reply, stop, number)

    def _request(self, asked: TurnMessage) -> GenerateRequest:
        task = self._task
        return GenerateRequest(
            namespace=task.namespace,
            job=task.job,
            uid=task.uid,
            agent=asked.agent,
            group=task.group,
            member=self._member,
            episode=self._episode,
            turn=self.ledger.num_turns,
            parent=asked.parent,
            append=asked.append if isinstance(asked.append, str) else tuple(asked.append),
            tools=None if asked.tools is None else tuple(asked.tools),
            max_tokens=asked.max_tokens,
            deadline_s=LEASE_S,
        )


def _answer(reply: GenerateReply, stop: StopReason, number: int) -> dict[str, Any]:
    sizes = {"num_tokens": reply.num_tokens, "num_prompt_tokens": reply.num_prompt_tokens}
    return {"kind": "reply", "text": reply.text, "stop_reason": stop, "turn": number, **sizes}


async def _send(child: Child, message: dict[str, Any]) -> None:
    """Send a message to the child; ignore a closed connection, which the next read reports."""
    with contextlib.suppress(ConnectionError):
        child.writer.write(encode_frame(message))
        await child.writer.drain()


def _close_late(child: Child, _: object) -> None:
    """Close the connection of a child that has exited, after its last message could be read; a pending read then ends."""
    asyncio.get_running_loop().call_later(_EXIT_GRACE_S, child.writer.close)


async def _unless_ended(child: Child, work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work`, but at most to the child's end. Raises _ChildEnded, and the errors of `work`."""
    task = asyncio.create_task(work)
    try:
        either: set[asyncio.Future[Any]] = {task, child.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _ChildEnded(child.ended.result())
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
