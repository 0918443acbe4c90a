"""One episode in a process of its own, forked from the fork server; always exits by `os._exit`.

It has a channel to the supervisor and nothing else: no bus, no credential, no other episode.
"""

import contextlib
import faulthandler
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from marlaas.environment import EpisodeState, Message, Reply, Split, StopReason, Task, TurnLimit, TurnRequest
from marlaas.envs.loading import Environment
from marlaas.envs.playing import explain, play_episode
from marlaas_api.names import derive_seed
from marlaas_worker.sandbox import frames, kernel

STACK_SIGNAL = signal.SIGUSR2
NICENESS = 5
MAX_FAULT_TEXT = 6000


@dataclass(frozen=True, slots=True)
class Confinement:
    """Limits of one child. tmp: its own folder for temporary files, removed after its exit."""

    memory_bytes: int
    tmp: str


class PipeChannel:
    """The agents' channel: requests every turn from the supervisor."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._sending = threading.Lock()  # an environment's threads send too

    def turn(self, request: TurnRequest) -> Reply:
        """Request a turn from the supervisor. Raises TurnLimit."""
        self._send(
            kind="turn",
            agent=request.agent,
            parent=request.parent,
            append=request.append if isinstance(request.append, str) else [_plain(m) for m in request.append],
            max_tokens=request.max_tokens,
            tools=request.tools,
        )
        answer = frames.receive(self._channel)
        if answer["kind"] == "limit":
            raise TurnLimit(answer["text"])
        stop = StopReason(answer["stop_reason"])
        return Reply(answer["text"], stop, answer["num_tokens"], answer["turn"], answer["num_prompt_tokens"])

    def tool(self, is_open: bool, rewards: Mapping[str, float]) -> None:
        """Report the start or end of a tool call, so that the supervisor can attribute a crash to it."""
        self._send(kind="tool", is_open=is_open, rewards=dict(rewards))

    def _send(self, **message: Any) -> None:
        frame = frames.encode(message)
        with self._sending:
            self._channel.sendall(frame)


def run(environment: Environment, channel: socket.socket, output: int, confinement: Confinement) -> NoReturn:
    """Set up the process, play one episode, report its result, and exit."""
    status = 1
    try:
        _settle(output, confinement)
        channel.sendall(frames.encode(_played(environment, channel)))
        status = 0
    except BaseException as error:  # the process ends here; the supervisor reads this in the output
        with contextlib.suppress(Exception):
            sys.stderr.write(explain(error))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _played(environment: Environment, channel: socket.socket) -> dict[str, Any]:
    start = frames.receive(channel)
    task = Task(Split(start["split"]), start["index"], start["seed"])
    _seed_everything(task)
    pid = os.getpid()
    try:
        state = EpisodeState(start["agents"], PipeChannel(channel), start.get("temperature", 1.0))
        outcome = play_episode(environment, task, state)
        message = {
            "kind": "score",
            "rewards": outcome.rewards,
            "metrics": outcome.metrics,
            "ending": outcome.ending,
            "tool_s": outcome.tool_s,
        }
    except BaseException as error:  # also exit() and KeyboardInterrupt: report everything to the supervisor
        message = {"kind": "fault", "text": explain(error)[-MAX_FAULT_TEXT:]}
    if os.getpid() != pid:
        os._exit(0)  # a process that the environment forked also returned from `play`; only the original one reports
    return message


def _settle(output: int, confinement: Confinement) -> None:
    """Set up the process: own session, no stdin, output to the supervisor, memory limit, low CPU priority."""
    os.setsid()
    kernel.adopt_orphans()
    kernel.die_with_parent()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kernel.limit_memory(confinement.memory_bytes)
    os.environ["TMPDIR"] = tempfile.tempdir = confinement.tmp
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True, chain=False)


def _seed_everything(task: Task) -> None:
    """Seed the global generators from the task alone, so that all members of a group get the same content."""
    seed = derive_seed(task.seed, "global", task.split, task.index)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content, "name": message.name}
    if message.tool_calls:
        plain["tool_calls"] = [{"name": c.name, "arguments": c.arguments, "id": c.id} for c in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain
