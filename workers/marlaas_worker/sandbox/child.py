"""One episode in a process of its own, forked from the fork server; always exits by `os._exit`.

It has a connection to the supervisor and nothing else: no bus, no credential, no other episode.
"""

import contextlib
import faulthandler
import json
import os
import resource
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, NoReturn

from marlaas.environment import Split, Task
from marlaas.environment_types import Play, ServiceFailed, UnknownAgent
from marlaas.envs.demonstrations import NoDemonstration, play_demonstration
from marlaas.envs.loading import Environment
from marlaas.envs.playing import explain, play_episode, score_group, seed_generators
from marlaas.envs.suites import Environments
from marlaas.episode_state import EpisodeState
from marlaas_api.names import digest_of
from marlaas_worker.sandbox import kernel
from marlaas_worker.sandbox.channel import SupervisorChannel, encode_frame, receive_frame

STACK_SIGNAL = signal.SIGUSR2
MAX_FAULT_TEXT = 6000


@dataclass(frozen=True, slots=True)
class Confinement:
    """Limits of one child.

    Attributes:
        memory_bytes: limit of the memory in use.
        tmp: folder for the child's temporary files; the fork server removes it after the child's exit.
        niceness: niceness (scheduling priority) that the child gets, unless its own is higher already.
    """

    memory_bytes: int
    tmp: str
    niceness: int = 0


def run(environments: Environments, connection: socket.socket, output: int, confinement: Confinement) -> NoReturn:
    """Set up the process, play one episode, report its result, and exit.

    Args:
        environments: the loaded environments, by suite; the job's own under the empty name.
        connection: socket to the supervisor.
        output: descriptor that becomes stdout and stderr.
    """
    status = 1
    try:
        _settle(output, confinement)
        connection.sendall(encode_frame(played(environments, connection)))
        status = 0
    except BaseException as error:  # the process ends here; the supervisor reads this in the output
        with contextlib.suppress(Exception):
            sys.stderr.write(explain(error))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def played(environments: Environments, connection: socket.socket) -> dict[str, Any]:
    """Play the episode, or compare the group, that the supervisor's first message names.

    Returns the last message to the supervisor: a `ScoreMessage`, `UnscoredMessage`, `ComparedMessage` or `FaultMessage` of `ledger`,
    not encoded yet. No exception is raised for an error of the environment.
    """
    start = receive_frame(connection)
    environment = environments[start.get("suite", "")]
    task = Task(Split(start["split"]), start["index"], start["seed"])
    seed_generators(task)
    pid = os.getpid()
    try:
        channel, temperature = SupervisorChannel(connection), start.get("temperature", 1.0)
        state = EpisodeState(start["agents"], channel, temperature, is_strict=start.get("is_strict", False))
        if "plays" in start:
            return _compared(environment, task, start)
        is_demonstrated = start.get("demonstrates", False)
        if is_demonstrated:
            held_out = [Task(Split.EVAL, one["index"], one["seed"]) for one in start.get("held_out", ())]
            outcome = play_demonstration(environment, task, state, held_out)
        else:
            outcome = play_episode(environment, task, state)
        message: dict[str, Any] = {
            "kind": "score",
            "rewards": outcome.rewards,
            "metrics": outcome.metrics,
            "ending": outcome.ending,
            "tool_s": outcome.tool_s,
            "tool_error": outcome.tool_error[-MAX_FAULT_TEXT:],
            "content": digest_of(*task.drawn) if task.drawn else "",
            "answer": outcome.answer,
            "compared_by": outcome.data if environment.compares and not is_demonstrated else None,
            "choices": [{"number": number, "rewards": rewards} for number, rewards in outcome.choices.items()],
            "turn_rewards": [
                {"agent": agent, "turn": turn, "reward": reward}
                for (agent, turn), reward in outcome.turn_rewards.items()
            ],
        }
        if not outcome.is_scored:
            message = {"kind": "unscored"}
    except (UnknownAgent, NoDemonstration) as error:
        message = {"kind": "fault", "text": str(error)[-MAX_FAULT_TEXT:], "is_permanent": True}
    except ServiceFailed as error:
        words = "\n".join([str(error), *getattr(error, "__notes__", ())])
        message = {"kind": "fault", "text": words[-MAX_FAULT_TEXT:], "is_infra": True}
    except BaseException as error:  # also exit() and KeyboardInterrupt: report everything to the supervisor
        message = {"kind": "fault", "text": explain(error)[-MAX_FAULT_TEXT:]}
    if os.getpid() != pid:
        os._exit(0)  # a process that the environment forked also returned from `play`; only the original one reports
    return message


def _compared(environment: Environment, task: Task, start: dict[str, Any]) -> dict[str, Any]:
    plays = [Play(one["rewards"], one["metrics"], json.loads(one["data"])) for one in start["plays"]]
    return {"kind": "compared", "scores": score_group(environment, task, plays)}


def prepare() -> None:
    """Set up, in the fork server, what all children inherit: no stdin, no core files, and stacks printed on a crash or `STACK_SIGNAL`."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True, chain=False)


def _settle(output: int, confinement: Confinement) -> None:
    """Set up the process: own process group, output to the supervisor, memory limit, CPU priority.

    The process stays in the session of the fork server: all episodes divide the CPU share of that session.
    """
    os.setpgid(0, 0)
    kernel.adopt_orphans()
    kernel.die_with_parent()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    # Not relative: the fork server may have lowered this process's share already, and twice would be the least share there is.
    os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), confinement.niceness))
    kernel.limit_memory(confinement.memory_bytes)
    os.environ["TMPDIR"] = tempfile.tempdir = confinement.tmp
