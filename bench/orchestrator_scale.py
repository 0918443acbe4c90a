"""The orchestrator's cost of a step with 512 jobs against 32, on a real nats-server, with simulated sandboxes, engine and trainer.

The orchestrator is the real process. This process plays the other roles with the product's messages: it takes tasks,
records a turn and an episode for each member after a simulated time, commits a version after each closed step, and
reports a replica of each role once a second. The simulated time grows with the number of jobs, so that all numbers of
jobs make about as many steps a second; what grows is then the cost per job. CPU seconds are taken between two moments
in which all jobs run, and divided by the steps that were recorded in between. The numbers of jobs alternate, and the ratio is
that of a round; of several rounds the median is printed, with the least and the largest.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from bench import options
from bench.orchestrator_queue import cpu_s, start
from bench.rounds import spread
from bench.runs import table
from bench.simulated_sandboxes import POOL, Sandboxes, identity
from marlaas_api import subjects
from marlaas_api.blobs import Blobs
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus_nats import connect
from marlaas_api.messages import (
    GroupDecided,
    JobDocument,
    Manifest,
    Meter,
    PolicyRecord,
    ReplicaReport,
    StepClosed,
    StopReason,
    TaskMessage,
    Turn,
)
from marlaas_api.names import AdapterRef, JobRef, episode_id
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import decode, encode, pack_ids, pack_logprobs

SPEC = {
    "poolRef": {"name": POOL},
    "environment": {"name": "reverse"},
    "rollout": {"groupSize": 2},
    "training": {"steps": 100_000, "groupsPerStep": 2, "maxStaleness": 1, "maxRefill": 0},
    "evaluation": {"tasks": 0},
}
_POLL_S = 10.0


@dataclass(kw_only=True)
class Simulation(Sandboxes):
    """The roles around the orchestrator. play_s: mean time of an episode. versions: committed, by job key."""

    blobs: Blobs
    play_s: float
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    policies: dict[str, PolicyRecord] = field(default_factory=dict)
    num_steps: int = 0

    async def submit(self, number: int) -> JobDocument:
        """Submit a job, and publish its version 0."""
        job = await super().submit(number)
        await self._commit(job.ref, step=-1, consumed=())
        return job

    async def train(self) -> None:
        """Commit a version for every closed step until cancelled."""
        consumer = await self.bus.consumer(subjects.GROUPS, "bench-trainer", "group.>")
        ready: dict[str, list[str]] = {}
        while True:
            for delivery in await consumer.fetch(64, _POLL_S):
                message = decode(delivery.stored.data)
                await delivery.ack()
                if isinstance(message, GroupDecided):
                    ready.setdefault(message.ref.key, []).extend(part.group for part in message.ready)
                elif isinstance(message, StepClosed):
                    self.num_steps += 1
                    consumed = tuple(ready.pop(message.ref.key, ()))
                    if consumed:
                        await self._commit(message.ref, message.step, consumed)

    async def report(self, num_jobs: int) -> None:
        """Report a rollout replica, which serves all newest versions, and a trainer, until cancelled."""
        bucket = await self.bus.bucket(subjects.REPLICAS)
        while True:
            served = tuple(_adapter(key, record).engine_name for key, record in self.policies.items())
            rollout = ReplicaReport(
                role="rollout",
                pool=POOL,
                replica="r0",
                slots=num_jobs,
                agents_per_slot=4,
                max_rank=64,
                verified=served,
            )
            trainer = ReplicaReport(role="trainer", pool=POOL, replica="t0", max_rank=64)
            for one in (rollout, trainer):
                key = subjects.replica_key(one.role, POOL, one.replica)
                await bucket.put(key, encode(one.model_copy(update={"at": time.time()})))
            await asyncio.sleep(1.0)

    async def play(self, task: TaskMessage) -> None:
        """Wait for the simulated time, then record a turn and an episode for each member."""
        await asyncio.sleep(self.play_s * self.draw.uniform(0.5, 1.5))
        version = self.policies[task.ref.key].version
        for member in range(task.group_size):
            turn = _turn(task, member, episode_id(task.group, member, 1), version)
            await self.bus.publish(subjects.turn(task.namespace, task.job, turn.episode, 0), encode(turn))
            await self.end(task, member)

    async def _commit(self, ref: JobRef, step: int, consumed: tuple[str, ...]) -> None:
        before = self.policies.get(ref.key, PolicyRecord(uid=ref.uid))
        names = {"namespace": ref.namespace, "job": ref.name, "uid": ref.uid, "agent": "policy"}
        manifest = Manifest(
            **names, version=before.version + 1, step=step, parent=before.manifest, rank=8, files={}, state=None,
            tensor_digests={}, probes=(), consumed=consumed, metrics={"loss": 0.5},
        )  # fmt: skip
        blob = await self.blobs.put(f"{ref.namespace}/{ref.name}", "manifest", encode(manifest))
        record = PolicyRecord(uid=ref.uid, version=manifest.version, manifest=blob, step=step, epoch=1, holder="t0")
        self.policies[ref.key] = record
        key = subjects.policy_key(ref.namespace, ref.name, "policy")
        await (await self.bus.bucket(subjects.POLICY)).put(key, encode(record))


def _adapter(key: str, record: PolicyRecord) -> AdapterRef:
    namespace, _, name = key.partition(".")
    return AdapterRef(namespace, name, record.uid, "policy", record.version)


def _turn(task: TaskMessage, member: int, episode: str, version: int) -> Turn:
    return Turn(
        **identity(task), agent="policy", group=task.group, member=member, episode=episode, turn=0, parent=None,
        version=version, adapter_sha256="", temperature=1.0, stop_reason=StopReason.STOP, opens_segment=True, append="",
        prompt_ids=pack_ids([1] * 12), output_ids=pack_ids([2] * 8), logprobs=pack_logprobs([-1.0] * 8), text="12345678",
        meter=Meter(prompt_tokens=12, output_tokens=8), replica="r0", at=time.time(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of CPU per step, steps per second, and memory in MiB of the orchestrator."""

    orchestrator_ms: float
    nats_ms: float
    steps_per_s: float
    memory_mib: float


@contextlib.asynccontextmanager
async def simulated(
    num_jobs: int, rate: float, folder: Path
) -> AsyncIterator[tuple[Simulation, psutil.Process, psutil.Process]]:
    """Run the orchestrator and the other roles; yield once every job has made a step."""
    async with EmbeddedNats(folder / "nats") as server:
        bus = await connect(server.url, name="bench")
        await bus.ensure()
        simulation = Simulation(bus=bus, spec=SPEC, blobs=open_blobs(str(folder / "blobs")), play_s=num_jobs / rate)
        process = await start(server.url, folder)
        tasks = [asyncio.create_task(simulation.report(num_jobs)), asyncio.create_task(simulation.train())]
        try:
            for number in range(num_jobs):
                await simulation.submit(number)
                tasks.append(asyncio.create_task(simulation.take_tasks(number)))
            while min(record.step for record in simulation.policies.values()) < 1:
                await asyncio.sleep(0.2)
                simulation.check()
                for task in tasks:
                    if task.done():
                        task.result()
            yield simulation, psutil.Process(process.pid), psutil.Process(server.pid)
        finally:
            for task in [*tasks, *simulation.playing]:
                task.cancel()
            process.kill()
            await process.wait()
            await bus.close()


async def measure(num_jobs: int, rate: float, seconds: float) -> Cost:
    with tempfile.TemporaryDirectory() as folder:
        async with simulated(num_jobs, rate, Path(folder)) as (simulation, orchestrator, nats):
            steps, began = simulation.num_steps, time.monotonic()
            before = cpu_s(orchestrator), cpu_s(nats)
            await asyncio.sleep(seconds)
            steps, wall = simulation.num_steps - steps, time.monotonic() - began
            used = [1000 * (cpu_s(one) - was) / steps for one, was in zip((orchestrator, nats), before, strict=True)]
            return Cost(used[0], used[1], steps / wall, orchestrator.memory_info().rss / 2**20)


def main(words: Sequence[str] = ()) -> None:
    parser = options("orchestrator_scale", __doc__)
    parser.add_argument("--jobs", nargs=2, type=int, default=[32, 512], metavar="N")
    parser.add_argument("--rate", type=float, default=24.0, help="aimed steps a second; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=40.0, help="measured time; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2)
    chosen: argparse.Namespace = parser.parse_args(words)
    costs: dict[int, list[Cost]] = {num_jobs: [] for num_jobs in chosen.jobs}
    for number, num_jobs in itertools.product(range(chosen.rounds), chosen.jobs):
        costs[num_jobs].append(asyncio.run(measure(num_jobs, chosen.rate, chosen.seconds)))
        cost = costs[num_jobs][-1]
        print(f"round {number}, {num_jobs} jobs: {cost.orchestrator_ms:.1f} ms/step", flush=True)
    print(f"\n{report(costs)}")


def report(costs: dict[int, list[Cost]]) -> str:
    """Return the table, and the ratios of the rounds. costs: by the smaller and the larger number of jobs."""
    rows = [
        [num_jobs, *(spread([getattr(cost, name) for cost in found], ".1f") for name in Cost.__slots__)]
        for num_jobs, found in costs.items()
    ]
    (few, small), (many, large) = costs.items()
    lines = [table(["jobs", "orchestrator ms/step", "nats-server ms/step", "steps/s", "orchestrator MiB"], rows), ""]
    for name, target in (("orchestrator", " (must 1.5x, aim 1.1x)"), ("nats", "")):
        pairs = zip(large, small, strict=True)
        found = [getattr(one, f"{name}_ms") / getattr(base, f"{name}_ms") for one, base in pairs]
        each = f"; rounds: {', '.join(f'{one:.2f}' for one in found)}" if len(found) > 1 else ""
        lines.append(f"{name}, {many} jobs against {few}: {median(found):.2f}x{target}{each}")
    return "\n".join(lines)
