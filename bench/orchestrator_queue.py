"""The orchestrator alone with 2,000 jobs that wait for slots, on a real nats-server: first progress, idle CPU time, memory, deletion.

A rollout replica's report with one job's slots stands in for a pool, so that one job is admitted and all others wait.
First progress (`first progress` in the output): from the last document to the last job's first progress message. Idle
(`idle` in the output): CPU seconds of the orchestrator's process over ten seconds in which nothing changes but the report.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench import options
from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.bus_nats import connect
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import JobDocument, ReplicaReport
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import encode

REST_S = 10.0
SPEC = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 10, "maxStaleness": 0}}


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("orchestrator_queue", __doc__)
    parser.add_argument("--jobs", type=int, default=2000)
    asyncio.run(measure(parser.parse_args(arguments).jobs))


async def measure(num_jobs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedNats(Path(folder) / "nats") as server:
            bus = await connect(server.url, name="bench")
            await bus.ensure()
            reporting = asyncio.create_task(report(bus))
            process = await start(server.url, Path(folder))
            try:
                await look(bus, psutil.Process(process.pid), num_jobs)
            finally:
                reporting.cancel()
                process.kill()
                await process.wait()
                await bus.close()


async def look(bus: Bus, process: psutil.Process, num_jobs: int) -> None:
    used = cpu_s(process)
    await submit(bus, num_jobs, deleted=False)
    began = time.perf_counter()
    await until(bus, subjects.PROGRESS, num_jobs)
    waited, used = time.perf_counter() - began, cpu_s(process) - used
    print(
        f"first progress of {num_jobs} jobs: {waited:.1f} s after the last document; {used:.1f} s of processor time in all"
    )
    await asyncio.sleep(3.0)
    used, before = cpu_s(process), await revision(bus)
    await asyncio.sleep(REST_S)
    percent = 100 * (cpu_s(process) - used) / REST_S
    print(f"idle: {percent:.1f} % of a core, {await revision(bus) - before} progress messages written in {REST_S:g} s")
    print(f"memory: {process.memory_info().rss / 2**20:.0f} MiB")
    used = cpu_s(process)
    await submit(bus, num_jobs, deleted=True)
    began = time.perf_counter()
    await until(bus, subjects.JOBS, 0)
    waited, used = time.perf_counter() - began, cpu_s(process) - used
    print(f"all {num_jobs} deleted: {waited:.1f} s after the last document; {used:.1f} s of processor time in all")


async def submit(bus: Bus, num_jobs: int, *, deleted: bool) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    spec = job_spec(RLJobSpec.model_validate(SPEC))
    places = asyncio.Semaphore(64)

    async def put(number: int) -> None:
        name = f"job-{number:04d}"
        document = JobDocument(
            namespace="team-a", job=name, uid=f"u{number}", pool="tiny", tenant="team-a", spec=spec, deleted=deleted
        )
        async with places:
            await bucket.put(document.ref.key, encode(document))

    await asyncio.gather(*(put(number) for number in range(num_jobs)))


async def report(bus: Bus) -> None:
    """Publish the report of a rollout replica with slots for one job."""
    bucket = await bus.bucket(subjects.REPLICAS)
    while True:
        one = ReplicaReport(role="rollout", pool="tiny", replica="r0", slots=3, max_rank=64, at=time.time())
        await bucket.put(subjects.replica_key("rollout", "tiny", "r0"), encode(one))
        await asyncio.sleep(2.0)


async def start(url: str, folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "marlaas_worker", "orchestrator", "--nats", url, "--blobs", str(folder / "blobs")),
        *("--name", "orchestrator-0", "--scratch", str(folder / "scratch")),
        stderr=asyncio.subprocess.DEVNULL,
    )


async def until(bus: Bus, name: str, number: int) -> None:
    bucket = await bus.bucket(name)
    while len(await bucket.entries()) != number:  # noqa: ASYNC110 - the bench polls like an outside observer
        await asyncio.sleep(0.2)


async def revision(bus: Bus) -> int:
    return max(entry.revision for entry in await (await bus.bucket(subjects.PROGRESS)).entries())


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
