"""Steps per second of a pool with two replicas and two trainers against one of each, with simulated stage times.

The orchestrator is the real process, on a real nats-server. Rollout replicas and trainers are the product's roles, in this
process (`simulated_pool`): engines sleep instead of generating, trainers sleep instead of computing a micro-batch. So
the CPU is not the limit, and what is measured is how the product spreads agents, requests and work. Sandboxes are
simulated: each episode is one turn, requested with the product's client. All jobs are asynchronous, and together they
keep one engine and one trainer busy. The two sizes alternate.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench import options
from bench.orchestrator_queue import cpu_s, start
from bench.replica_figures import Observed, Rates, rates
from bench.runs import print_table
from bench.simulated_pool import pool_of, serve_rollout, serve_trainer
from bench.simulated_sandboxes import POOL, Sandboxes, identity
from marlaas.models import prepare
from marlaas_api import subjects
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus import Bus
from marlaas_api.bus_nats import connect
from marlaas_api.messages import ChatMessage, GenerateRequest, PolicyRecord, PoolDocument, ReplicaReport, TaskMessage
from marlaas_api.names import episode_id
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.numeric import slots_needed
from marlaas_api.wire import decode_as
from marlaas_worker.role import RoleContext
from marlaas_worker.sandbox.turns import LEASE_S, TurnClient

SIZES = (1, 2)
MUST, AIM = 1.8, 1.95
SPEC: dict[str, Any] = {
    "poolRef": {"name": POOL},
    "environment": {"name": "reverse"},
    "rollout": {"groupSize": 4, "maxTokens": 96},
    "training": {"steps": 100_000, "groupsPerStep": 2, "maxStaleness": 1, "maxRefill": 0, "microbatchTokens": 512},
    "evaluation": {"tasks": 0},
}
_START_S, _TURN_S, _POLL_S = 300.0, 3600.0, 0.2


@dataclass(kw_only=True)
class OneTurnSandboxes(Sandboxes):
    """Sandboxes whose episodes are one turn, requested from the pool's replicas."""

    client: TurnClient

    async def play(self, task: TaskMessage) -> None:
        """Play all members at once."""
        await asyncio.gather(*(self._play(task, member) for member in range(task.group_size)))

    async def _play(self, task: TaskMessage, member: int) -> None:
        request = GenerateRequest(
            **identity(task),
            agent="policy",
            group=task.group,
            member=member,
            episode=episode_id(task.group, member, 1),
            turn=0,
            parent=None,
            append=(ChatMessage(role="user", content=f"{task.index:06}"),),
            deadline_s=LEASE_S,
        )
        await self.client.generate(request, _TURN_S)
        await self.end(task, member)


@dataclass
class Pool:
    """A running pool: its bus, the processes whose CPU is counted, and its roles.

    readers: tasks that read the bus for the sandboxes and for `commits`, the times of each job's commits by policy key.
    """

    bus: Bus
    processes: Sequence[psutil.Process]
    roles: list[asyncio.Task[None]]
    sandboxes: OneTurnSandboxes
    readers: list[asyncio.Task[None]] = field(default_factory=list)
    commits: dict[str, list[float]] = field(default_factory=dict)

    async def observed(self) -> Observed:
        """Read the CPU time and the latest reports."""
        used = sum(cpu_s(one) for one in self.processes)
        return Observed(time.monotonic(), used, await reports(self.bus))

    async def follow(self) -> None:
        """Note the time of each commit, until cancelled."""
        versions: dict[str, int] = {}
        async with (await self.bus.bucket(subjects.POLICY)).watch() as entries:
            async for entry in entries:
                record = None if entry.data is None else decode_as(PolicyRecord, entry.data)
                if record is not None and record.version > versions.get(entry.key, 0):
                    versions[entry.key] = record.version
                    self.commits.setdefault(entry.key, []).append(time.monotonic())

    def check(self) -> None:
        """Raise the error of a role or of an episode that has failed."""
        for task in (*self.roles, *self.readers):
            if task.done():
                task.result()
        self.sandboxes.check()


async def reports(bus: Bus) -> dict[str, ReplicaReport]:
    """Return the reports of rollout replicas and trainers, by name."""
    entries = await (await bus.bucket(subjects.REPLICAS)).entries()
    found = [decode_as(ReplicaReport, entry.data) for entry in entries if entry.data is not None]
    return {one.replica: one for one in found if one.role in ("rollout", "trainer")}


@contextlib.asynccontextmanager
async def running(size: int, chosen: argparse.Namespace, folder: Path) -> AsyncIterator[Pool]:
    """Run a pool of so many replicas and trainers; yield once every job has made two steps."""
    document = pool_of(prepare("tiny"), slots_needed(chosen.jobs, SPEC["training"]["maxStaleness"]))
    async with EmbeddedNats(folder / "nats") as server, contextlib.AsyncExitStack() as stack:
        bus = await connect(server.url, name="bench")
        stack.push_async_callback(bus.close)
        await bus.ensure()
        orchestrator = await start(server.url, folder)
        stack.push_async_callback(orchestrator.wait)
        stack.callback(orchestrator.kill)
        roles: list[asyncio.Task[None]] = []
        stack.push_async_callback(cancel, roles)
        for number in range(size):
            speeds = chosen.engine_speed, chosen.trainer_speed
            await add_roles(str(number), document, speeds, (server.url, folder), roles)
        client = await stack.enter_async_context(TurnClient(bus))
        sandboxes = OneTurnSandboxes(bus=bus, spec=SPEC, client=client)
        processes = [psutil.Process(one) for one in (os.getpid(), orchestrator.pid, server.pid)]
        pool = Pool(bus, processes, roles, sandboxes)
        stack.push_async_callback(cancel, sandboxes.playing)
        stack.push_async_callback(cancel, pool.readers)  # first, so that no task begins to play after the others ended
        pool.readers.append(asyncio.create_task(pool.follow()))
        for number in range(chosen.jobs):
            await sandboxes.submit(number)
            pool.readers.append(asyncio.create_task(sandboxes.take_tasks(number)))
        async with asyncio.timeout(_START_S):
            while len(pool.commits) < chosen.jobs or min(map(len, pool.commits.values())) < 2:
                pool.check()
                await asyncio.sleep(_POLL_S)
        yield pool


async def add_roles(
    suffix: str, document: PoolDocument, speeds: tuple[float, float], at: tuple[str, Path], roles: list[Any]
) -> None:
    """Start a trainer and a replica, one after the other: transformers cannot load two models at once in a process.

    Args:
        suffix: of their names.
        speeds: of the engine and of the trainer, tokens/s.
        at: URL of the NATS server, and a folder.
    """
    url, folder = at
    engine_speed, trainer_speed = speeds
    for role, serve, speed in (("trainer", serve_trainer, trainer_speed), ("rollout", serve_rollout, engine_speed)):
        name = f"{role}-{suffix}"
        bus = await connect(url, name=name)
        context = RoleContext(name, bus, open_blobs(str(folder / "blobs")), folder / name)
        context.scratch.mkdir()
        roles.append(asyncio.create_task(_serve(serve(context, document, speed), bus), name=name))
        async with asyncio.timeout(_START_S):
            while not ((found := (await reports(bus)).get(name)) and found.ready):
                if roles[-1].done():
                    roles[-1].result()
                await asyncio.sleep(_POLL_S)


async def _serve(serving: Any, bus: Bus) -> None:
    try:
        await serving
    finally:
        await bus.close()


async def cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their ends."""
    found = list(tasks)
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)


async def measure(size: int, chosen: argparse.Namespace) -> Rates:
    with tempfile.TemporaryDirectory() as folder:
        async with running(size, chosen, Path(folder)) as pool:
            before = await pool.observed()
            await asyncio.sleep(chosen.seconds)
            pool.check()
            return rates(before, await pool.observed(), pool.commits.values())


def rows(chosen: argparse.Namespace, found: dict[int, list[Rates]]) -> Iterator[list[Any]]:
    """Measure the sizes in turns, and add each figure to `found`."""
    for number, size in itertools.product(range(chosen.rounds), SIZES):
        one = asyncio.run(measure(size, chosen))
        found[size].append(one)
        shares = [f"{100 * share:.0f} %" for share in (one.engines_busy, one.trainers_busy)]
        yield [
            number,
            f"{size} + {size}",
            f"{one.steps_per_s:.2f}",
            f"{one.tokens_per_s:.0f}",
            *shares,
            one.spread,
            f"{one.cpu_cores:.2f}",
        ]


def main(words: Sequence[str] = ()) -> None:
    parser = options("replicas", __doc__)
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=90.0, help="measured time of a size; default: %(default)s")
    parser.add_argument("--engine-speed", type=float, default=512.0, help="tokens/s of an engine; default: %(default)s")
    parser.add_argument(
        "--trainer-speed", type=float, default=850.0, help="padded tokens/s of a trainer; default: %(default)s"
    )
    chosen = parser.parse_args(words)
    head = [
        "round",
        "replicas + trainers",
        "steps/s",
        "tokens/s",
        "engines busy",
        "trainers busy",
        "jobs by replica / trainer",
    ]
    found: dict[int, list[Rates]] = {size: [] for size in SIZES}
    print_table([*head, "CPU cores used"], rows(chosen, found))
    ratios = [two.steps_per_s / one.steps_per_s for one, two in zip(found[1], found[2], strict=True)]
    cores = max(one.cpu_cores for size in SIZES for one in found[size])
    print(
        f"\n2 + 2 against 1 + 1: {median(ratios):.2f}x (rounds: {', '.join(f'{one:.2f}' for one in ratios)}; "
        f"must {MUST}x, aim {AIM}x); at most {cores:.2f} of {os.cpu_count()} cores used"
    )
