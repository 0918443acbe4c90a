"""What one stream for each job would cost nats-server, against the streams that all jobs share.

    python -m bench job_streams [--jobs 1 32 300] [--replicas 1 3]

*shared*: TASKS, TURNS, EPISODES and GROUPS hold the subjects of all jobs. *per job*: a stream of each job holds its turns, episodes
and group log, and one of its own its tasks: an ack removes a task, and only a work queue does that. Either way a job has three consumers
(its sandboxes', the orchestrator's, a trainer's) and 64 turns of 2 KiB. Prints, in one run: memory and idle processor time of all servers, the time to admit a
job, to restart one server until it answers for the last job, and to delete a job's data; then whether a server refuses a stream whose
`max_bytes` exceed what is left of its store.
"""

import asyncio
import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import nats
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig, StreamConfig
from nats.js.client import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from bench import options
from marlaas_api.nats_server import EmbeddedNats

TURNS, TURN_BYTES, MAX_BYTES = 64, 2048, 8 << 20
KINDS = {"task": "workqueue", "turn": "limits", "episode": "limits", "group": "limits"}
CONSUMED = ("task", "episode", "group")
WITHIN_S, IDLE_S = 120.0, 10.0


class Shared:
    """Four streams of all jobs."""

    name = "shared"

    async def begin(self, js: JetStreamContext, replicas: int, num_jobs: int) -> None:
        for kind, retention in KINDS.items():
            config = StreamConfig(name=kind, subjects=[f"{kind}.>"], retention=retention, num_replicas=replicas)
            await js.add_stream(config, max_bytes=num_jobs * MAX_BYTES)

    async def admit(self, js: JetStreamContext, job: int) -> None:
        for kind in CONSUMED:
            await js.add_consumer(kind, ConsumerConfig(durable_name=f"j{job}", filter_subject=f"{kind}.j{job}.>"))

    async def delete(self, js: JetStreamContext, job: int) -> None:
        for kind in CONSUMED:
            with contextlib.suppress(NotFoundError):  # repeated after a lost answer
                await js.delete_consumer(kind, f"j{job}")
        for kind in KINDS:
            await js.purge_stream(kind, subject=f"{kind}.j{job}.>")


class PerJob:
    """Two streams of each job."""

    name = "per job"

    def __init__(self) -> None:
        self._replicas = 1

    async def begin(self, js: JetStreamContext, replicas: int, num_jobs: int) -> None:
        self._replicas = replicas

    async def admit(self, js: JetStreamContext, job: int) -> None:
        kinds = {"tasks": ["task"], "data": ["turn", "episode", "group"]}
        for name, parts in kinds.items():
            subjects = [f"{kind}.j{job}.>" for kind in parts]
            config = StreamConfig(name=f"{name}-{job}", subjects=subjects, retention=KINDS[parts[0]])
            await js.add_stream(config, max_bytes=MAX_BYTES, discard="new", num_replicas=self._replicas)
        for kind in CONSUMED:
            config = ConsumerConfig(durable_name=kind, filter_subject=f"{kind}.j{job}.>")
            await js.add_consumer(f"tasks-{job}" if kind == "task" else f"data-{job}", config)

    async def delete(self, js: JetStreamContext, job: int) -> None:
        for name in ("tasks", "data"):
            with contextlib.suppress(NotFoundError):
                await js.delete_stream(f"{name}-{job}")


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


@contextlib.asynccontextmanager
async def servers(number: int) -> AsyncIterator[list[EmbeddedNats]]:
    """Start servers with JetStream; several are a cluster."""
    ports = free_ports(number)
    routes = [f"nats-route://127.0.0.1:{port}" for port in ports]
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found: list[EmbeddedNats] = []
        for at, port in enumerate(ports):
            cluster = {"name": "bench", "listen": f"127.0.0.1:{port}", "routes": routes}
            extra = f"server_name: s{at}\ncluster: {json.dumps(cluster)}" if number > 1 else ""
            found.append(EmbeddedNats(folder / f"s{at}", extra_config=extra))
        await asyncio.gather(*(server.start() for server in found))
        for server in found:
            stack.push_async_callback(server.stop)
        yield found


async def patiently(work: Callable[[], Awaitable[object]]) -> None:
    """Repeat until it succeeds: a cluster elects its leaders first."""
    end = time.perf_counter() + WITHIN_S
    while True:
        try:
            await work()
            return
        except (NatsError, TimeoutError):
            if time.perf_counter() > end:
                raise
            await asyncio.sleep(0.05)


async def connected(*found: EmbeddedNats) -> nats.NATS:
    """Connect to any of the servers, and again after each restart."""

    async def ignore(_: Exception) -> None: ...

    urls = [server.url for server in found]
    return await nats.connect(urls, max_reconnect_attempts=-1, error_cb=ignore)


def cpu_s(found: list[EmbeddedNats]) -> float:
    """Return the processor time of all servers since their start."""
    ticks = 0
    for server in found:
        fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mib(found: list[EmbeddedNats]) -> float:
    """Return the resident memory of all servers."""
    kib = 0
    for server in found:
        status = Path(f"/proc/{server.pid}/status").read_text()
        kib += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return kib / 1024


async def measure(layout: Shared | PerJob, replicas: int, num_jobs: int) -> dict[str, float]:
    async with servers(replicas) as found:
        client = await connected(*found)
        js = client.jetstream(timeout=10)
        await patiently(js.account_info)
        empty = memory_mib(found)
        await patiently(lambda: layout.begin(js, replicas, num_jobs))
        began = time.perf_counter()
        for job in range(num_jobs):
            await patiently(lambda job=job: layout.admit(js, job))  # type: ignore[misc]
        admitted = time.perf_counter() - began
        for job in range(num_jobs):
            for turn in range(TURNS):
                await js.publish(f"turn.j{job}.e{turn}", bytes(TURN_BYTES))
        figures = {"MiB": memory_mib(found), "MiB more": memory_mib(found) - empty}
        figures["admit ms"] = 1000 * admitted / num_jobs
        before = cpu_s(found)
        await asyncio.sleep(IDLE_S)
        figures["idle ms/s"] = 1000 * (cpu_s(found) - before) / IDLE_S
        began = time.perf_counter()
        await found[-1].restart()
        other = await connected(found[-1])
        await patiently(lambda: other.jetstream(timeout=2).publish(f"turn.j{num_jobs - 1}.e", b"x"))
        figures["restart s"] = time.perf_counter() - began
        await patiently(js.account_info)
        began = time.perf_counter()
        for job in range(few := min(num_jobs, 8)):
            await patiently(lambda job=job: layout.delete(js, job))  # type: ignore[misc]
        figures["delete ms"] = 1000 * (time.perf_counter() - began) / few
        await other.close()
        await client.close()
        return figures


async def reservation() -> str:
    """Return what a server says to a stream that exceeds its store."""
    with tempfile.TemporaryDirectory() as folder:
        extra = f"jetstream {{ store_dir: {json.dumps(folder)}, max_file_store: 100MiB }}"
        async with EmbeddedNats(Path(folder), extra_config=extra) as server:
            client = await nats.connect(server.url)
            js = client.jetstream()
            await js.add_stream(name="first", subjects=["first"], max_bytes=60 << 20)
            try:
                await js.add_stream(name="second", subjects=["second"], max_bytes=60 << 20)
                said = "accepted"
            except APIError as error:
                said = f"refused: {error.err_code} {error.description}"
            await client.close()
            return said


async def compare(jobs: Sequence[int], replicas: Sequence[int]) -> None:
    for number in replicas:
        for num_jobs in jobs:
            shared, per_job = [await measure(layout, number, num_jobs) for layout in (Shared(), PerJob())]
            print(f"R{number}, {num_jobs} jobs: {'shared':>14}{'per job':>10}{'ratio':>8}")
            for what, value in shared.items():
                print(f"  {what:16}{value:12.1f}{per_job[what]:10.1f}{per_job[what] / max(value, 1e-9):8.2f}")
    print(f"60 + 60 MiB of streams in a store of 100 MiB: the second one is {await reservation()}")


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("job_streams", __doc__)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 32, 300])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 3])
    chosen = parser.parse_args(arguments)
    asyncio.run(compare(chosen.jobs, chosen.replicas))
