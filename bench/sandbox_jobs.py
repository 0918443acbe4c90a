"""Sandboxes of many jobs as processes of their own, with a real NATS server: CPU of start-up and per episode, and memory.

The rollout role is this process and replies at once, so its cost and that of the engine are not in the figures. Each
job plays groups of eight episodes of `calculator`, whose tool takes 0.4 s. CPU is user + system time from /proc.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO

from bench.runs import table
from bench.sandbox import answer_turn
from marlaas.local.processes import ROLE_COMMAND, RoleProcess
from marlaas.local.sandbox_parent import SandboxParent, sandbox_parent
from marlaas_api import subjects
from marlaas_api.bus import Bus, Request
from marlaas_api.bus_nats import connect
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import GenerateRequest, JobDocument, TaskMessage
from marlaas_api.names import Split, derive_seed, train_group
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import decode, encode

GROUP_SIZE = 8
STEPS = 6
TOOL_S = 0.4
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds of sandboxes. parent: the common parent of all sandboxes, if there is one."""

    parent: float = 0.0
    supervisors: float = 0.0
    fork_servers: float = 0.0
    children: float = 0.0

    def __sub__(self, other: "Cpu") -> "Cpu":
        return Cpu(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))

    def __add__(self, other: "Cpu") -> "Cpu":
        return Cpu(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def total(self) -> float:
        return self.parent + self.supervisors + self.fork_servers + self.children


def document(name: str) -> JobDocument:
    """Return the document of a job of `calculator`."""
    environment = {"name": "calculator", "args": {"tool_latency_s": TOOL_S}}
    manifest = {"poolRef": {"name": "tiny"}, "environment": environment, "training": {"steps": 1}}
    spec = job_spec(RLJobSpec.model_validate(manifest))
    return JobDocument(namespace="bench", job=name, uid=f"uid-{name}", pool="tiny", tenant="bench", spec=spec)


class Rollout:
    """Plays the rollout role for all jobs, and the orchestrator's part: tasks out, episodes in."""

    def __init__(self, bus: Bus, jobs: Sequence[JobDocument]) -> None:
        self._bus = bus
        self._jobs = jobs
        self.num_turns = 0
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        await self._bus.ensure()
        for job in self._jobs:
            name = subjects.consumer(job.namespace, job.job, "sandbox")
            subject = subjects.task(job.namespace, job.job)
            await self._bus.consumer(subjects.TASKS, name, subject, ack_wait_s=subjects.TASK_ACK_WAIT_S)
            generation = subjects.generation(job.namespace, job.job, "policy")
            await self._stack.enter_async_context(self._bus.listen(generation, self._answer, "rollout"))

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

    async def _answer(self, request: Request) -> None:
        message = decode(request.data)
        if isinstance(message, GenerateRequest):
            self.num_turns += 1
            await self._bus.send(request.reply, encode(answer_turn(message)))


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


class Sandboxes:
    """The sandbox processes, one per job. parent: forks them; None: each is started anew."""

    def __init__(self, folder: Path, url: str, parent: SandboxParent | None) -> None:
        self._folder = folder
        self._url = url
        self._parent = parent
        self._processes: list[RoleProcess] = []

    async def start(self, jobs: Sequence[JobDocument]) -> None:
        with (self._folder / "sandboxes.log").open("ab") as log:
            for job in jobs:
                path = self._folder / f"{job.job}.json"
                path.write_text(job.model_dump_json())
                arguments = [
                    *("sandbox", "--nats", self._url, "--blobs", str(self._folder / "blobs"), "--name", "sandbox-0"),
                    *("--job-file", str(path), "--scratch", str(self._folder / job.job)),
                ]
                self._processes.append(await self._started(arguments, log))

    async def _started(self, arguments: list[str], log: IO[bytes]) -> RoleProcess:
        if self._parent is not None:
            return await self._parent.fork(arguments, log, ())
        return await asyncio.create_subprocess_exec(
            *ROLE_COMMAND, *arguments, stdout=log, stderr=log, start_new_session=True
        )

    async def stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            await process.wait()

    def cpu(self) -> Cpu:
        spent = Cpu(parent=_cpu_s(self._parent.pid)[0]) if self._parent is not None else Cpu()
        for process in self._processes:
            own, reaped = _cpu_s(process.pid)
            spent += Cpu(supervisors=own + reaped)
            for server in _children(process.pid):
                own, reaped = _cpu_s(server)
                spent += Cpu(fork_servers=own, children=reaped)
        return spent

    def memory(self) -> float:
        """Return the proportional set size of all processes, in MiB."""
        pids = [one.pid for one in (*self._processes, *([self._parent] if self._parent is not None else []))]
        pids = [*dict.fromkeys(pid for root in pids for pid in (root, *_descendants(root)))]
        return sum(map(_pss, pids)) / 1024


def _cpu_s(pid: int) -> tuple[float, float]:
    """Return the CPU seconds of a process, and those of its reaped children."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system, user_children, system_children = map(int, numbers[11:15])
    return (user + system) / _TICKS, (user_children + system_children) / _TICKS


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (thread / "children").read_text().split())
    return found


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


class _NoSessions:
    def add(self, session: int) -> None: ...
    def remove(self, session: int) -> None: ...


async def measure(num_jobs: int, forked: bool, steps: int = STEPS) -> list[object]:
    """Return a row of the table: start-up per sandbox, then the cost per episode, of `num_jobs` jobs."""
    jobs = [document(f"job-{number}") for number in range(num_jobs)]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="marlaas-bench-")))
        server = await stack.enter_async_context(EmbeddedNats(folder / "nats"))
        bus = await connect(server.url, name="bench")
        stack.push_async_callback(bus.close)
        rollout = Rollout(bus, jobs)
        await rollout.open()
        stack.push_async_callback(rollout.close)
        parent = None
        if forked:
            log = stack.enter_context((folder / "parent.log").open("wb"))
            parent = await stack.enter_async_context(sandbox_parent(ROLE_COMMAND, log, os.environ, _NoSessions()))
        sandboxes = Sandboxes(folder, server.url, parent)
        stack.push_async_callback(sandboxes.stop)
        await sandboxes.start(jobs)
        await rollout.play(range(1), 1)
        started, memory, turns = sandboxes.cpu(), sandboxes.memory(), rollout.num_turns
        await rollout.play(range(1, 1 + steps), GROUP_SIZE)
        spent, turns = sandboxes.cpu() - started, rollout.num_turns - turns
    num = num_jobs * steps * GROUP_SIZE
    per_start = [f"{1e3 * value / num_jobs:.0f}" for value in _parts(started)]
    per_episode = [f"{1e3 * value / num:.1f}" for value in _parts(spent)]
    how = "forked" if forked else "processes"
    return [num_jobs, how, *per_start, *per_episode, f"{turns / num:.1f}", f"{memory:.0f}"]


def _parts(cpu: Cpu) -> list[float]:
    return [cpu.total, cpu.parent, cpu.supervisors, cpu.fork_servers, cpu.children]


PARTS = ("all", "parent", "supervisor", "fork server", "children")
HEADER = [
    "jobs",
    "sandboxes",
    *(f"start, {part}, ms" for part in PARTS),
    *(f"episode, {part}, ms" for part in PARTS),
    "turns",
    "memory (PSS), MiB",
]


def report(numbers: Sequence[int] = (1, 8, 32)) -> str:
    """Measure for each number of jobs, with and without a common parent, and return the table."""
    rows = [asyncio.run(measure(number, forked)) for number in numbers for forked in (False, True)]
    return table(HEADER, rows)


if __name__ == "__main__":
    print(report([int(word) for word in sys.argv[1:]] or (1, 8, 32)))
