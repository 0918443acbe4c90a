"""The supervisor's side of one episode: validates the child's messages, answers its turns, records them.

A child runs foreign code. So `ledger.parse` validates each message, and `ledger.TurnLedger` counts turns and tokens itself. Time in
which a turn waits or is generated does not count against the episode's timeout.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator, Sequence, Set
from functools import partial
from typing import Any, TypeVar

from marlaas.envs.playing import UNSCORED
from marlaas_api.background import await_all
from marlaas_api.messages import (
    FaultClass,
    GenerateRequest,
    JobDocument,
    JobSpec,
    StopReason,
    TaskMessage,
)
from marlaas_api.names import SCORES, Split, derive_seed
from marlaas_worker.sandbox.channel import BadFrame, encode_frame, read_frame
from marlaas_worker.sandbox.faults import Fault, fault_of_exit
from marlaas_worker.sandbox.ledger import (
    AgentsMessage,
    BadChildMessage,
    ChildMessage,
    ComparedMessage,
    FaultMessage,
    ScoreMessage,
    ToolMessage,
    TurnLedger,
    TurnMessage,
    UnscoredMessage,
    parse,
)
from marlaas_worker.sandbox.server import Child, Ended
from marlaas_worker.sandbox.turns import (
    LEASE_S,
    TurnClient,
    TurnFailed,
    TurnRefused,
    TurnStopsEngine,
    TurnTooLong,
    TurnWaited,
)

_OUT_OF_PLACE = "the environment sent an invalid message: scores of a group where none, or others, were asked for"
_EXIT_GRACE_S = 0.5
"""Time for the report of a child's exit after its connection has closed, or for its last message after its exit."""
_CUT_GRACE_S = 30.0
"""Seconds that the sandbox waits beyond a turn's time limit before the turn fails. A healthy engine cuts the reply at the limit itself."""
_T = TypeVar("_T")


@contextlib.contextmanager
def _as_fault() -> Iterator[None]:
    try:
        yield
    except (BadChildMessage, BadFrame) as error:
        raise Fault(FaultClass.ENV, f"the environment sent an invalid message: {error}") from error


@contextlib.contextmanager
def _turn_faults(agent: str) -> Iterator[None]:
    """Translate errors of a turn of this agent into Fault."""
    try:
        yield
    except (BadChildMessage, TurnTooLong) as error:
        raise Fault(FaultClass.ENV, str(error)) from error
    except TurnRefused as error:
        text = f"a turn of agent {agent!r} was refused: {error}"
        raise Fault(FaultClass.ENV, text, is_retryable=False, is_permanent=error.is_permanent) from error
    except TurnStopsEngine as error:
        raise Fault(FaultClass.ENV, str(error), is_retryable=False) from error
    except TurnFailed as error:
        raise Fault(FaultClass.INFRA, str(error)) from error
    except TurnWaited as error:
        raise Fault(FaultClass.WAITED, str(error)) from error


class _ChildEnded(Exception):
    def __init__(self, ended: Ended) -> None:
        super().__init__()
        self.ended = ended


class ChildSession:
    """One play of an episode: answers the child's requests for turns until the child sends a score. Call `run` once.

    Args:
        document: of the job.
        turns: client that requests the turns.
        task: the task to play.
        member: number of the episode in its group.
        episode: the episode's id.

    Attributes:
        ledger: record of the turns so far.
        tool_s: seconds in tool calls so far, measured by the supervisor.
    """

    def __init__(self, document: JobDocument, turns: TurnClient, task: TaskMessage, member: int, episode: str) -> None:
        self._spec, self._seed = document.spec, document.seed
        self._turns = turns
        self._task = task
        self._member = member
        self._episode = episode
        self.ledger = TurnLedger(tuple(agent.name for agent in self._spec.agents), self._spec.rollout.max_turns)
        if self._spec.teacher is not None:
            self.ledger.may_speak = self._spec.called_agents
        self._left_s = self._spec.environment.episode_timeout_seconds
        self.tool_s = 0.0

    async def run(self, child: Child) -> ScoreMessage:
        """Start the episode in a child and return its score. Raises Fault."""
        await _send(child, self._start() | _of_suite(self._spec, self._task))
        close_late = partial(_close_late, child)
        child.ended.add_done_callback(close_late)
        turns: set[asyncio.Task[None]] = set()
        reading: asyncio.Task[ChildMessage] = asyncio.create_task(self._read(child))
        try:
            while True:
                await self._wait(child, reading, turns)
                for turn in [one for one in turns if one.done()]:
                    turns.remove(turn)
                    turn.result()
                if not reading.done():
                    continue
                match message := await self._received(child, reading):
                    case AgentsMessage():
                        self._limit(message)
                    case TurnMessage():
                        turns.add(asyncio.create_task(self._answer(child, message)))
                    case ToolMessage():
                        self.ledger.tool_rewards = message.rewards if message.is_open else None
                    case FaultMessage() | ComparedMessage():
                        raise _fault_of(message)
                    case UnscoredMessage():
                        raise Fault(FaultClass.UNSCORED, UNSCORED, is_retryable=False)
                    case ScoreMessage():
                        self._reward(message)
                        child.ended.remove_done_callback(close_late)
                        await asyncio.wait({child.ended}, timeout=_EXIT_GRACE_S)
                        return message
                reading = asyncio.create_task(self._read(child))
        finally:
            await _cancel({reading, *turns})

    async def ask_teacher(self) -> None:
        """After the episode's end, request the teacher's logprobs of the tokens that the trainable agents generated, and wait for the replies.

        The rollout role records the logprobs; nothing is returned. Do nothing if the job has no teacher, the task is held out, or the group's turns
        are demonstrations instead of samples.

        Raises Fault if a request fails.
        """
        teacher, task = self._spec.teacher, self._task
        if teacher is None or task.split is not Split.TRAIN or self._spec.demonstrates(task.group):
            return
        trained = {agent.name for agent in self._spec.agents if agent.trainable}
        leaves = [leaf for agent, own in self.ledger.leaves().items() if agent in trained for leaf in own]
        with _turn_faults(teacher):
            await await_all(self._turns.generate(self._score(teacher, leaf), self._timeout_s) for leaf in leaves)

    def _score(self, teacher: str, leaf: int) -> GenerateRequest:
        """Return the request to the teacher to score the conversation that ends with a turn. leaf: number of that turn in the episode."""
        task = self._task
        return GenerateRequest(
            namespace=task.namespace,
            job=task.job,
            uid=task.uid,
            agent=teacher,
            group=task.group,
            member=self._member,
            episode=self._episode,
            turn=SCORES + leaf,
            parent=None,
            append="",
            max_tokens=1,
            scores=leaf,
            deadline_s=LEASE_S,
        )

    def _start(self) -> dict[str, Any]:
        """Return the first message to the child, which names the task to play."""
        task = self._task
        start: dict[str, Any] = {
            "split": task.split,
            "index": task.index if task.task is None else task.task,
            "seed": task.seed,
        }
        start |= {"agents": self._spec.called_agents, "temperature": self._spec.rollout.temperature}
        start["is_strict"] = self._spec.training.max_staleness == 0
        if self._spec.demonstrates(task.group):
            rows = self._spec.measured(task.group)
            start["demonstrates"] = True
            start["held_out"] = [{"index": row, "seed": derive_seed(self._seed, Split.EVAL.value, row)} for row in rows]
        return start

    def _limit(self, named: AgentsMessage) -> None:
        """Record the agents that the task may call. Raises Fault."""
        with _as_fault():
            self.ledger.limit(named.agents)

    def _reward(self, score: ScoreMessage) -> None:
        """Record the rewards of turns and candidates. Raises Fault."""
        with _as_fault():
            self.ledger.reward(score)

    async def _read(self, child: Child) -> ChildMessage:
        """Return the child's next message. Raises Fault, and the errors of a closed connection."""
        with _as_fault():
            return parse(await read_frame(child.reader), self._spec.called_agents)

    async def _received(self, child: Child, reading: "asyncio.Task[ChildMessage]") -> ChildMessage:
        """Return the message that was read. Raises Fault, also if the connection was closed instead."""
        try:
            return reading.result()
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._disconnected(child) from None

    async def _wait(
        self, child: Child, reading: "asyncio.Task[ChildMessage]", turns: Set["asyncio.Task[None]"]
    ) -> None:
        """Wait until the child's next message is read or one of the turns ends.

        The time counts against the episode's timeout only while no turn is open.

        Args:
            child: prints its stack if the timeout is exceeded.
            reading: reads the next message.
            turns: the open turns.

        Raises: Fault, after the timeout.
        """
        started, is_own = time.monotonic(), not turns
        waits: set[asyncio.Task[Any]] = {reading, *turns}
        await asyncio.wait(
            waits, timeout=max(0.0, self._left_s) if is_own else None, return_when=asyncio.FIRST_COMPLETED
        )
        if is_own:
            self._count_time(time.monotonic() - started)
            if not reading.done():
                await child.print_stack()
                limit_s = self._spec.environment.episode_timeout_seconds
                text = f"the environment took longer than {limit_s:g} s, turns not counted"
                raise Fault(FaultClass.ENV, f"{text} (environment.episodeTimeoutSeconds)", by_policy=True)

    def _count_time(self, seconds: float) -> None:
        self._left_s -= seconds
        if self.ledger.tool_rewards is not None:
            self.tool_s += seconds

    async def _disconnected(self, child: Child) -> Fault:
        """Return the fault of a child whose connection is closed; kill the child if its end is not reported soon.

        The end is reported after the connection closes, and much later if the fork server gets no CPU or ends too. Only the fork server
        can tell whether the child still ran.
        """
        await asyncio.wait({child.ended}, timeout=_EXIT_GRACE_S)
        await child.kill()
        return fault_of_exit(child.ended.result(), self._spec.environment.memory)

    async def _answer(self, child: Child, asked: TurnMessage) -> None:
        """Have a turn generated and send the answer to the child. Raises Fault."""
        await _send(child, {"agent": asked.agent, "turn": asked.number, **await self._play_turn(child, asked)})

    @property
    def _timeout_s(self) -> float:
        return self._spec.turn_timeout_s + _CUT_GRACE_S

    async def _play_turn(self, child: Child, asked: TurnMessage) -> dict[str, Any]:
        """Have a turn generated and return the answer for the child: a `reply`, or `limit` if the agent has no turn left. Raises Fault."""
        try:
            with _turn_faults(asked.agent):
                if not self.ledger.begin(asked):
                    text = f"agent {asked.agent!r} has had its {self.ledger.max_turns} turns (rollout.maxTurns)"
                    return {"kind": "limit", "text": text}
                try:
                    reply = await _unless_ended(child, self._turns.generate(self._request(asked), self._timeout_s))
                except (TurnTooLong, TurnRefused) as error:
                    if not asked.is_measured:
                        raise
                    # It is left out, as one that is too long for the context.
                    return {"kind": "limit", "text": str(error)}
        except _ChildEnded as end:
            raise fault_of_exit(end.ended, self._spec.environment.memory) from None
        stop = reply.stop_reason or StopReason.STOP
        if reply.context_tokens and self.ledger.num_turns == 0:
            text = (
                f"the first prompt of agent {asked.agent!r} has {reply.num_prompt_tokens} tokens, and the base model's context of {reply.context_tokens} tokens "
                "leaves no room for a reply: shorten the prompt, or raise rollout.maxModelLen of the pool"
            )
            raise Fault(FaultClass.ENV, text, is_retryable=False)
        self.ledger.end(asked, stop, reply.num_tokens, is_overtime=reply.is_overtime)
        sizes = {"num_tokens": reply.num_tokens, "num_prompt_tokens": reply.num_prompt_tokens}
        parts = None if reply.parts is None else reply.parts.model_dump(mode="json")
        texts = {"text": reply.text, "opening": reply.opening, "parts": parts}
        return {"kind": "reply", **texts, "stop_reason": stop, **sizes}

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
            turn=self.ledger.number(asked.agent, asked.number),
            parent=None if asked.parent is None else self.ledger.number(asked.agent, asked.parent),
            append=asked.append if isinstance(asked.append, str) else tuple(asked.append),
            tools=None if asked.tools is None else tuple(asked.tools),
            max_tokens=asked.max_tokens,
            stop=tuple(asked.stop),
            demonstration=asked.demonstration,
            deadline_s=LEASE_S,
        )


async def compared(
    child: Child, document: JobDocument, task: TaskMessage, plays: Sequence[dict[str, Any]]
) -> ComparedMessage:
    """Have a child compare the episodes of a group, and return its message. Raises Fault, BadFrame (the plays are too long).

    plays: `rewards`, `metrics` and `data` (JSON text of `Score.data`) of each episode.
    """
    environment, agents = document.spec.environment, document.spec.called_agents
    index = task.index if task.task is None else task.task
    start = {"split": task.split, "index": index, "seed": task.seed, "agents": agents, "plays": list(plays)}
    start |= _of_suite(document.spec, task)
    child.writer.write(encode_frame(start))
    try:
        async with asyncio.timeout(environment.episode_timeout_seconds):
            with _as_fault():
                message = parse(await read_frame(child.reader), agents)
    except (asyncio.IncompleteReadError, ConnectionError):
        await asyncio.wait({child.ended}, timeout=_EXIT_GRACE_S)
        await child.kill()
        raise fault_of_exit(child.ended.result(), environment.memory) from None
    except TimeoutError:
        await child.print_stack()
        text = f"`score_group` took longer than {environment.episode_timeout_seconds:g} s (environment.episodeTimeoutSeconds)"
        raise Fault(FaultClass.ENV, text) from None
    if not isinstance(message, ComparedMessage) or [set(rewards) for rewards, _ in message.scores] != [
        set(agents)
    ] * len(plays):
        raise _fault_of(message)
    return message


def _of_suite(spec: JobSpec, task: TaskMessage) -> dict[str, str]:
    """Return the field of a child's first message that names the suite; no field if the job's environment plays the task."""
    suite = spec.suite_environment(task.group)
    return {"suite": suite} if suite else {}


def _fault_of(message: ChildMessage) -> Fault:
    """Return the fault that a child reports; for any other message, an ENV fault: the child sent it when it was not expected."""
    if not isinstance(message, FaultMessage):
        return Fault(FaultClass.ENV, _OUT_OF_PLACE)
    fault = FaultClass.INFRA if message.is_infra else FaultClass.ENV
    return Fault(fault, message.text, is_permanent=message.is_permanent)


async def _cancel(tasks: Set["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait until they have ended; their errors are not raised."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _send(child: Child, message: dict[str, Any]) -> None:
    """Send a message to the child; ignore a closed connection, which the next read reports."""
    with contextlib.suppress(ConnectionError):
        child.writer.write(encode_frame(message))
        await child.writer.drain()


def _close_late(child: Child, _: object) -> None:
    """Close the connection of a child that has exited, `_EXIT_GRACE_S` later, so that its last message is read first. A pending read then ends."""
    asyncio.get_running_loop().call_later(_EXIT_GRACE_S, child.writer.close)


async def _unless_ended(child: Child, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`; cancel it if the child ends first. Raises _ChildEnded, and the errors of `work`."""
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
