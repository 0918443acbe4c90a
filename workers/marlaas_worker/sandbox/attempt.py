"""One play of one member of a group.

A child runs the environment; the supervisor requests its turns and judges its end. Time in which a turn waits
or is generated does not count against the episode's timeout; `turn_clock` counts it.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from marlaas_api import names
from marlaas_api.last_words import visible
from marlaas_api.messages import Ending, Episode, FaultClass, GenerateRequest, JobDocument, StopReason, TaskMessage
from marlaas_worker.sandbox import frames
from marlaas_worker.sandbox.child_messages import (
    BadChildMessage,
    FaultMessage,
    Saying,
    ScoreMessage,
    ToolMessage,
    TurnMessage,
    parse,
)
from marlaas_worker.sandbox.children import Children
from marlaas_worker.sandbox.ledger import TurnLedger, judge
from marlaas_worker.sandbox.server import BrokenEnvironment, Child, Ended, ForkServerLost
from marlaas_worker.sandbox.turns import LEASE_S, TurnClient, TurnFailed, TurnTooLong, TurnWaited

_LAST_WORDS_S = 0.5
_MAX_FAULT_TEXT = 10000
_T = TypeVar("_T")


class Fault(Exception):
    """The episode does not count, unless `by_policy` is set and a tool call was open: then the policy caused it."""

    def __init__(self, fault: FaultClass, text: str, by_policy: bool = False) -> None:
        super().__init__(text)
        self.fault = fault
        self.by_policy = by_policy


class _Gone(Exception):
    def __init__(self, ended: Ended) -> None:
        super().__init__()
        self.ended = ended


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """Result of an episode that counts."""

    ending: Ending
    rewards: dict[str, float]
    metrics: dict[str, float]
    tool_s: float


@dataclass(frozen=True, slots=True)
class AttemptDependencies:
    """Dependencies that all attempts of a job share."""

    document: JobDocument
    children: Children
    turns: TurnClient

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the job's agents."""
        return tuple(agent.name for agent in self.document.spec.agents)


class Attempt:
    """One play. Each play of a member has its own `number`, which is part of the episode's id."""

    def __init__(self, dependencies: AttemptDependencies, task: TaskMessage, member: int, number: int) -> None:
        self._dependencies = dependencies
        self._spec = dependencies.document.spec
        self._task = task
        self._member = member
        self._episode = names.episode_id(task.group, member, number)
        self._ledger = TurnLedger(dependencies.agents, self._spec.rollout.max_turns)
        self._left_s = self._spec.environment.episode_timeout_seconds
        self._tool_s = 0.0

    async def play(self, prior_faults: tuple[FaultClass, ...]) -> Episode:
        """Play and return an Episode, whatever the environment's code does."""
        started = time.monotonic()
        try:
            verdict: EpisodeResult | Fault = await self._played()
        except Fault as fault:
            verdict = fault
        ended = {"prior_faults": prior_faults, "duration_s": time.monotonic() - started}
        blank = unplayed(self._task, self._member, self._episode)
        if isinstance(verdict, Fault):
            masked = {"fault": verdict.fault, "fault_text": _bounded(str(verdict)), "num_turns": self._ledger.num_turns}
            return blank.model_copy(update={**ended, **masked})
        scored = {
            "ending": verdict.ending,
            "rewards": verdict.rewards,
            "metrics": verdict.metrics,
            "leaves": self._ledger.leaves(),
            "num_turns": self._ledger.num_turns,
            "tool_s": verdict.tool_s,
        }
        return blank.model_copy(update={**ended, **scored})

    async def _played(self) -> EpisodeResult:
        output = None
        try:
            async with self._dependencies.children.child() as child:
                output = child.output
                return await self._conversed(child)
        except Fault as fault:
            if fault.by_policy and self._ledger.tool_rewards is not None:
                return EpisodeResult(Ending.TOOL_ERROR, self._ledger.tool_rewards, {}, self._tool_s)
            printed = output.text() if output is not None else ""
            raise Fault(fault.fault, f"{fault}\noutput: {printed}" if printed else str(fault)) from fault
        except BrokenEnvironment as error:
            raise Fault(FaultClass.ENV, str(error)) from error
        except ForkServerLost as error:
            raise Fault(FaultClass.INFRA, str(error)) from error

    async def _conversed(self, child: Child) -> EpisodeResult:
        task = self._task
        start = {"split": task.split, "index": task.index, "seed": task.seed}
        shared = {"agents": self._dependencies.agents, "temperature": self._spec.rollout.temperature}
        await _tell(child, start | shared)
        while True:
            saying = await self._heard(child)
            match saying:
                case TurnMessage():
                    await self._answer(child, saying)
                case ToolMessage():
                    self._ledger.tool_rewards = saying.rewards if saying.is_open else None
                case FaultMessage():
                    raise Fault(FaultClass.ENV, saying.text)
                case ScoreMessage():
                    await asyncio.wait({child.ended}, timeout=_LAST_WORDS_S)
                    return EpisodeResult(self._ledger.ending(saying), saying.rewards, saying.metrics, saying.tool_s)

    async def _heard(self, child: Child) -> Saying:
        """Wait for the child's next message within the episode's time, which counts as the environment's."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, self._left_s)):
                body = await _unless_gone(child, frames.read(child.reader), _LAST_WORDS_S)
            return parse(body, self._dependencies.agents)
        except TimeoutError:
            await child.print_stack()
            limit_s = self._spec.environment.episode_timeout_seconds
            text = (
                f"the environment took longer than {limit_s:g} s, turns not counted (environment.episodeTimeoutSeconds)"
            )
            raise Fault(FaultClass.ENV, text, by_policy=True) from None
        except (BadChildMessage, frames.BadFrame) as error:
            raise Fault(
                FaultClass.ENV, f"the environment wrote to its supervisor what is no message: {error}"
            ) from error
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._hung_up(child) from None
        except _Gone as gone:
            raise self._died(gone.ended) from None
        finally:
            self._spend(time.monotonic() - started)

    def _spend(self, seconds: float) -> None:
        self._left_s -= seconds
        if self._ledger.tool_rewards is not None:
            self._tool_s += seconds

    async def _hung_up(self, child: Child) -> Fault:
        await asyncio.wait({child.ended}, timeout=_LAST_WORDS_S)
        if child.ended.done():
            return self._died(child.ended.result())
        return Fault(FaultClass.ENV, "the environment closed its pipe to the supervisor", by_policy=True)

    def _died(self, ended: Ended) -> Fault:
        death = judge(ended, self._spec.environment.memory)
        return Fault(death.fault, death.text, death.by_policy)

    async def _answer(self, child: Child, asked: TurnMessage) -> None:
        try:
            if not self._ledger.admits(asked):
                limit = self._spec.rollout.max_turns
                text = f"agent {asked.agent!r} has had its {limit} turns (rollout.maxTurns)"
                return await _tell(child, {"kind": "limit", "text": text})
            timeout_s = self._spec.environment.turn_timeout_seconds
            reply = await _unless_gone(child, self._dependencies.turns.generate(self._request(asked), timeout_s))
        except (BadChildMessage, TurnTooLong) as error:
            raise Fault(FaultClass.ENV, str(error)) from error
        except TurnFailed as error:
            raise Fault(FaultClass.INFRA, str(error)) from error
        except TurnWaited as error:
            raise Fault(FaultClass.WAITED, str(error)) from error
        except _Gone as gone:
            raise self._died(gone.ended) from None
        number, stop = self._ledger.num_turns, reply.stop_reason or StopReason.STOP
        self._ledger.note(asked, stop)
        answer = {"text": reply.text, "stop_reason": stop, "num_tokens": reply.num_tokens, "turn": number}
        return await _tell(child, {"kind": "reply", "num_prompt_tokens": reply.num_prompt_tokens, **answer})

    def _request(self, asked: TurnMessage) -> GenerateRequest:
        return GenerateRequest(
            **_job(self._task),
            agent=asked.agent,
            group=self._task.group,
            member=self._member,
            episode=self._episode,
            turn=self._ledger.num_turns,
            parent=asked.parent,
            append=asked.append if isinstance(asked.append, str) else tuple(asked.append),
            tools=None if asked.tools is None else tuple(asked.tools),
            max_tokens=asked.max_tokens,
            deadline_s=LEASE_S,
        )


def unplayed(task: TaskMessage, member: int, episode: str) -> Episode:
    """Return the fields of an episode that are known before it is played."""
    return Episode(**_job(task), group=task.group, split=task.split, index=task.index, member=member, episode=episode)


def _bounded(text: str) -> str:
    """Keep the beginning and most of the end of a fault's text, and escape its control characters.

    The text ends up in statuses, and so in terminals of people of other namespaces.
    """
    text = visible(text)
    if len(text) <= _MAX_FAULT_TEXT:
        return text
    return f"{text[:1000]}\n[…]\n{text[-(_MAX_FAULT_TEXT - 1000) :]}"


def _job(task: TaskMessage) -> dict[str, str]:
    return {"namespace": task.namespace, "job": task.job, "uid": task.uid}


async def _tell(child: Child, message: dict[str, Any]) -> None:
    """Send a message to the child; ignore a closed connection, which the next read reports."""
    with contextlib.suppress(ConnectionError):
        child.writer.write(frames.encode(message))
        await child.writer.drain()


async def _unless_gone(child: Child, work: Coroutine[Any, Any, _T], grace_s: float = 0.0) -> _T:
    """Await `work`, but at most `grace_s` after the child's end. Raises _Gone, and the errors of `work`."""
    task = asyncio.create_task(work)
    try:
        either: set[asyncio.Future[Any]] = {task, child.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and grace_s:
            await asyncio.wait({task}, timeout=grace_s)
        if task.done():
            return task.result()
        raise _Gone(child.ended.result())
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
