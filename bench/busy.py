"""Share of time in which the engine has work: strict against maxStaleness 1, one job against four, with tools that take 300 ms."""

import asyncio
import copy
import tempfile
from pathlib import Path
from typing import Any

from bench.runs import Run, documents, run, table
from marlaas_api import subjects
from marlaas_api.bus import Bucket
from marlaas_api.bus_nats import connect
from marlaas_api.messages import ReplicaReport
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import decode_as

STEPS = 4


def manifest(num_jobs: int, staleness: int) -> list[dict[str, Any]]:
    """Return `num_jobs` jobs of the quickstart's calculator with slow tools, and their pool."""
    found = documents("quickstart.yaml")
    pool = next(one for one in found if one["kind"] == "ModelPool")
    pool["spec"]["adapterSlots"] = num_jobs * (staleness + 2)
    job = next(one for one in found if one["kind"] == "RLJob" and one["spec"]["environment"]["name"] == "calculator")
    job["spec"]["environment"].setdefault("args", {})["tool_latency_s"] = 0.3
    job["spec"]["training"] |= {"steps": STEPS, "maxStaleness": staleness}
    job["spec"]["evaluation"] = {"tasks": 0}
    jobs = []
    for number in range(num_jobs):
        one = copy.deepcopy(job)
        one["metadata"]["name"] = f"calculator-{number}"
        jobs.append(one)
    return [pool, *jobs]


async def measure(objects: list[dict[str, Any]]) -> tuple[Run, list[tuple[float, float]]]:
    """Run the jobs on a server of our own.

    Also return, from the engine role's reports, pairs of Unix time and seconds with a non-empty batch.
    """
    points: list[tuple[float, float]] = []
    async with EmbeddedNats(Path(tempfile.mkdtemp(prefix="marlaas-busy-"))) as server:
        bus = await connect(server.url, name="bench")
        await bus.ensure()
        watcher = asyncio.create_task(_watch(await bus.bucket(subjects.REPLICAS), points))
        result = await asyncio.to_thread(run, objects, nats=server.url)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await bus.close()
    return result, points


async def _watch(bucket: Bucket, points: list[tuple[float, float]]) -> None:
    async with bucket.watch("rollout.") as entries:
        async for entry in entries:
            if entry.data:
                report = decode_as(ReplicaReport, entry.data)
                points.append((report.at, report.busy_s))


def share(points: list[tuple[float, float]], begin: float, end: float) -> float:
    """Return the share of the time between two moments in which the batch was not empty, from the nearest reports."""
    first = min(points, key=lambda point: abs(point[0] - begin))
    last = min(points, key=lambda point: abs(point[0] - end))
    return (last[1] - first[1]) / (last[0] - first[0])


def main() -> None:
    rows = []
    for num_jobs in (1, 4):
        for staleness in (0, 1):
            result, points = asyncio.run(measure(manifest(num_jobs, staleness)))
            steps = [record for records in result.records.values() for record in records]
            begin, end = min(record["at"] - record["wall_s"] for record in steps), max(record["at"] for record in steps)
            rate = len(steps) / (end - begin)
            rows.append([num_jobs, staleness, f"{share(points, begin, end):.0%}", f"{rate:.2f}", f"{end - begin:.0f}"])
            print(*rows[-1], flush=True)
    print(table(["jobs", "maxStaleness", "engine batch not empty", "steps/s, all jobs", "training s"], rows))
