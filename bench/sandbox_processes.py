"""The sandbox processes of many jobs, for `bench sandbox_jobs`: they are started and stopped here, and their CPU and memory are read from /proc."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO

from marlaas.local.processes import RoleProcess
from marlaas.local.sandbox_host import SandboxHost
from marlaas_api.messages import JobDocument

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds of sandboxes. supervisors: their processes, or the one of all."""

    supervisors: float = 0.0
    fork_servers: float = 0.0
    children: float = 0.0

    def __sub__(self, other: "Cpu") -> "Cpu":
        return Cpu(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))

    def __add__(self, other: "Cpu") -> "Cpu":
        return Cpu(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def total(self) -> float:
        return self.supervisors + self.fork_servers + self.children


class Sandboxes:
    """The sandboxes, one per job. command: starts a role; host: serves them all; None: each is a process."""

    def __init__(self, folder: Path, url: str, command: Sequence[str], host: SandboxHost | None) -> None:
        self._command = command
        self._folder = folder
        self._url = url
        self._host = host
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
        if self._host is not None:
            return await self._host.start(arguments, log, ())
        return await asyncio.create_subprocess_exec(
            *self._command, *arguments, stdout=log, stderr=log, start_new_session=True
        )

    async def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            await process.wait()

    @property
    def _pids(self) -> set[int]:
        """Process ids of the supervisors."""
        hosts = set() if self._host is None or self._host.pid is None else {self._host.pid}
        return hosts | {one.pid for one in self._processes if isinstance(one, asyncio.subprocess.Process)}

    def cpu(self) -> Cpu:
        supervisors = self._pids
        spent = Cpu(supervisors=sum(_cpu_s(pid)[0] for pid in supervisors))
        for server in [server for pid in supervisors for server in _children(pid)]:
            own, reaped = _cpu_s(server)
            spent += Cpu(fork_servers=own, children=reaped)
        return spent

    def memory(self) -> float:
        """Return the proportional set size of all processes, in MiB."""
        return sum(map(_pss, self.pids())) / 1024

    def pids(self) -> set[int]:
        """Return the ids of all processes."""
        return {pid for root in self._pids for pid in (root, *_descendants(root))}


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


class NoSessions:
    """Registers no session: the measurement ends its processes itself."""

    def add(self, session: int) -> None: ...
    def remove(self, session: int) -> None: ...
