"""Sandboxes of many jobs in one process, as in `marlaas run`, with a real NATS server: CPU of start-up and per episode, and memory.

The rollout role is this process, so its cost and that of the engine are not in the figures. Each job plays groups of
eight episodes of `calculator`, whose tool takes 0.4 s. A turn takes --turns seconds, with a heartbeat every second, as
when it waits for a busy engine. CPU is user + system time from /proc. With --before, the sandboxes of another commit play
the same episodes, and rows alternate.
"""

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench import options
from bench.runs import table
from bench.sandbox import answer_turn
from bench.sandbox_processes import Cpu, NoSessions, Sandboxes
from bench.sources import python, python_path, worktree
from marlaas.local.processes import ROLE_COMMAND
from marlaas.local.sandbox_host import HostCommand, sandbox_host
from marlaas_api import subjects
from marlaas_api.background import background
from marlaas_api.bus import Bus, Request
from marlaas_api.bus_nats import connect
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import GenerateReply, GenerateRequest, JobDocument, ReplyPhase, TaskMessage
from marlaas_api.names import Split, derive_seed, train_group
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import decode, encode

GROUP_SIZE = 8
TOOL_S = 0.4
HEARTBEAT_S = 1.0
PARTS = ("all", "supervisor", "fork server", "children")
HEADER = [
    "jobs",
    "a turn",
    "code",
    "sandboxes",
    *(f"start, {part}, ms" for part in PARTS),
    *(f"episode, {part}, ms" for part in PARTS),
    "turns",
    "memory (PSS), MiB",
    "processes",
    "first episodes after, s",
]


def document(name: str) -> JobDocument:
    """Return the document of a job of `calculator`."""
    environment = {"name": "calculator", "args": {"tool_latency_s": TOOL_S}}
    manifest = {"poolRef": {"name": "tiny"}, "environment": environment, "training": {"steps": 1}}
    spec = job_spec(RLJobSpec.model_validate(manifest))
    return JobDocument(namespace="bench", job=name, uid=f"uid-{name}", pool="tiny", tenant="bench", spec=spec)


class Rollout:
    """Plays the rollout role for all jobs, and the orchestrator's part: tasks out, episodes in.

    turn_s: seconds from a request to its result.
    """

    def __init__(self, bus: Bus, jobs: Sequence[JobDocument], turn_s: float) -> None:
        self._bus = bus
        self._jobs = jobs
        self.turn_s = turn_s
        self.num_turns = 0
        self._active: dict[str, tuple[GenerateRequest, str]] = {}
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        await self._bus.ensure()
        self._turns = await self._stack.enter_async_context(asyncio.TaskGroup())
        await self._stack.enter_async_context(background(self._send_heartbeats()))
        for job in self._jobs:
            name = subjects.consumer(job.namespace, job.job, "sandbox")
            subject = subjects.task(job.namespace, job.job)
            await self._bus.consumer(subjects.TASKS, name, subject, ack_wait_s=subjects.TASK_ACK_WAIT_S)
            generation = subjects.generation(job.namespace, job.job, "policy")
            await self._stack.enter_async_context(self._bus.listen(generation, self._accept, "rollout"))

    async def close(self) -> None:
        await self._stack.aclose()

    async def play(self, steps: range, group_size: int) -> None:
        """Have every job play one group a step, each job at its own pace."""
        async with asyncio.TaskGroup() as group:
            for job in self._jobs:
                group.create_task(self._play(job, steps, group_size))

    async def _play(self, job: JobDocument, steps: range, group_size: int) -> None:
        subject = subjects.episode(job.namespace, job.job)
        consumer = await self._bus.consumer(subjects.EPISODES, f"bench_{job.job}", subject)
        for index in steps:
            await self._bus.publish(subjects.task(job.namespace, job.job), encode(_task(job, index, group_size)))
            left = group_size
            while left:
                for delivery in await consumer.fetch(left, 5.0):
                    await delivery.ack()
                    left -= 1

    async def _accept(self, request: Request) -> None:
        message = decode(request.data)
        if not isinstance(message, GenerateRequest) or (name := _name(message)) in self._active:
            return
        self._active[name] = message, request.reply
        await self._bus.send(request.reply, encode(_reply(message, ReplyPhase.ACCEPTED)))
        self._turns.create_task(self._answer(message, request.reply))

    async def _answer(self, message: GenerateRequest, inbox: str) -> None:
        await asyncio.sleep(self.turn_s)
        self.num_turns += 1
        del self._active[_name(message)]
        await self._bus.send(inbox, encode(answer_turn(message)))

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for message, inbox in list(self._active.values()):
                await self._bus.send(inbox, encode(_reply(message, ReplyPhase.HEARTBEAT)))


def _name(message: GenerateRequest) -> str:
    return f"{message.episode}.{message.turn}"


def _reply(message: GenerateRequest, phase: ReplyPhase) -> GenerateReply:
    return GenerateReply(request=_name(message), phase=phase, replica="rollout-0", doing="waits for its turn")


def _task(job: JobDocument, index: int, group_size: int) -> TaskMessage:
    return TaskMessage(
        namespace=job.namespace,
        job=job.job,
        uid=job.uid,
        group=train_group(job.ref, index),
        split=Split.TRAIN,
        index=index,
        seed=derive_seed(0, Split.TRAIN, index),
        group_size=group_size,
    )


@dataclass(frozen=True, slots=True)
class Workload:
    """What one row measures. turn_s: seconds of a turn; before: commit of the sandboxes' code; None: this one."""

    num_jobs: int
    turn_s: float
    steps: int
    hosted: bool
    before: str | None


async def measure(workload: Workload) -> list[object]:
    """Return a row of the table: start-up per sandbox, then the cost per episode."""
    jobs = [document(f"job-{number}") for number in range(workload.num_jobs)]
    command = _command(workload.before)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="marlaas-bench-")))
        server = await stack.enter_async_context(EmbeddedNats(folder / "nats"))
        bus = await connect(server.url, name="bench")
        stack.push_async_callback(bus.close)
        rollout = Rollout(bus, jobs, 0.0)
        await rollout.open()
        stack.push_async_callback(rollout.close)
        host = None
        if workload.hosted:
            how = HostCommand(command, os.environ, folder / "host.log")
            host = await stack.enter_async_context(sandbox_host(how, NoSessions()))
        sandboxes = Sandboxes(folder, server.url, command, host)
        stack.push_async_callback(sandboxes.stop)
        begun = time.perf_counter()
        await sandboxes.start(jobs)
        await rollout.play(range(1), 1)
        first_s, started, rollout.num_turns = time.perf_counter() - begun, sandboxes.cpu(), 0
        memory, num_processes = sandboxes.memory(), len(sandboxes.pids())
        rollout.turn_s = workload.turn_s
        await rollout.play(range(1, 1 + workload.steps), GROUP_SIZE)
        spent = sandboxes.cpu() - started
    num = workload.num_jobs * workload.steps * GROUP_SIZE
    return [
        *(workload.num_jobs, f"{workload.turn_s:g} s", workload.before or "now"),
        "in one process" if workload.hosted else "processes",
        *(f"{1e3 * value / workload.num_jobs:.0f}" for value in _parts(started)),
        *(f"{1e3 * value / num:.1f}" for value in _parts(spent)),
        f"{rollout.num_turns / num:.1f}",
        f"{memory:.0f}",
        num_processes,
        f"{first_s:.1f}",
    ]


def _command(before: str | None) -> Sequence[str]:
    """Return the command of a role, by the code of a commit."""
    if before is None:
        return ROLE_COMMAND
    tree = worktree(before)
    return ("/usr/bin/env", f"PYTHONPATH={python_path(tree)}", python(tree), *ROLE_COMMAND[1:])


def _parts(cpu: Cpu) -> list[float]:
    return [cpu.total, cpu.supervisors, cpu.fork_servers, cpu.children]


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("sandbox_jobs", __doc__)
    parser.add_argument("--jobs", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--turns", nargs="+", type=float, default=[0.0], help="seconds of a turn")
    parser.add_argument("--steps", type=int, default=6, help="groups of each job; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--processes", action=argparse.BooleanOptionalAction, help="also with a process for each sandbox"
    )
    parser.add_argument(
        "--before",
        metavar="COMMIT",
        help="also by the code of this commit (since 7be25f14), from a worktree in the cache",
    )
    chosen = parser.parse_args(arguments)
    codes = [chosen.before, None] if chosen.before else [None]
    hows = [False, True] if chosen.processes else [True]
    rows = []
    for num_jobs, turn_s, _, hosted in itertools.product(chosen.jobs, chosen.turns, range(chosen.repeats), hows):
        for before in codes:
            rows.append(asyncio.run(measure(Workload(num_jobs, turn_s, chosen.steps, hosted, before))))
            print(*rows[-1], flush=True)
    print(table(HEADER, rows))
