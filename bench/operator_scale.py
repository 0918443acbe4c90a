"""The operator at scale, on a real API server with a real orchestrator: 2,000 queued RLJobs, a restart, latency of progress.

    python -m bench operator_scale [--jobs N] [--reports N] [--large]

etcd and kube-apiserver (no nodes), nats-server with users, orchestrator and operator as processes of this machine.
`steady`: every job has the status that gives its reason to wait, and nothing has been written for a second. PATCHes
are the API server's responses as counted by the operator. Latency: from the orchestrator's write of a job's progress
on the bus until a GET of the job shows it, GETs 20 ms apart. `round`: `bench.operator_round`, with 10,000 jobs and 100 Tenants.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil
from tests.api_server import serve_kinds
from tests.operator.real.harness import OperatorHarness, rigged

from bench import options
from bench.operator_load import Load, Orchestrator
from bench.operator_round import round_seconds
from bench.runs import table
from marlaas_e2e.control_plane import ControlPlane

NAMESPACES = 20


async def measure_memory(harness: OperatorHarness, num_jobs: int) -> list[list[object]]:
    """Return the memory of operator and orchestrator with jobs of the largest allowed size: once all are queued, and after a restart of both."""
    found: list[tuple[str, str]] = []
    async with _orchestrator(harness) as orchestrator:
        load = Load(harness, num_jobs, NAMESPACES, large=True)
        await load.prepare()
        harness.start_operator()
        await load.ready()
        await load.seed()
        await load.queued()
        await load.idle()
        found.append(_memory(harness, orchestrator))
        print("peak / now, MiB, of operator and orchestrator:", *found[-1], flush=True)
        assert harness.operator is not None
        harness.operator.kill()
        orchestrator.kill()
        orchestrator.start()
        harness.start_operator()
        await load.ready()
        await load.idle()
        await asyncio.sleep(20)  # re-reads of the orchestrator
        found.append(_memory(harness, orchestrator))
    what = f"{num_jobs} RLJobs of the largest allowed size, peak / steady; after a restart"
    return [
        [f"{what}: {name}", f"{queued}; {restarted} MiB", f"≤ {limit} MiB", ""]
        for name, queued, restarted, limit in zip(("operator", "orchestrator"), *found, (512, 1024), strict=True)
    ]


def _memory(harness: OperatorHarness, orchestrator: Orchestrator) -> tuple[str, str]:
    """Return the highest resident memory so far, and the present one, of operator and orchestrator."""
    assert harness.operator is not None
    operator, other = (_resident(pid) for pid in (harness.operator.pid, orchestrator.pid))
    return operator, other


def _resident(pid: int) -> str:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return " / ".join(f"{int(lines[name].split()[0]) / 1024:.0f}" for name in ("VmHWM", "VmRSS"))


async def measure(harness: OperatorHarness, num_jobs: int, num_reports: int) -> list[list[object]]:
    rows: list[list[object]] = []
    async with _orchestrator(harness) as orchestrator:
        load = Load(harness, num_jobs, NAMESPACES)
        await load.prepare()
        began = time.monotonic()
        harness.start_operator()
        await load.ready()
        rows.append(["operator start, nothing to do", f"{time.monotonic() - began:.1f} s", "", ""])
        created_s = await load.create()
        last_apply = time.monotonic()
        steady_at = await load.steady()
        rows.append([f"{num_jobs} RLJobs created in", f"{created_s:.1f} s", "", ""])
        rows.append(["last apply → all statuses steady", f"{steady_at - last_apply:.1f} s", "≤ 30 s", "≤ 8 s"])
        writes = harness.metric("marlaas_operator_api_requests_total", verb="PATCH", resource="rljobs/status")
        rows.append(["status PATCHes per job", f"{writes / num_jobs:.2f}", "≤ 2", "1"])
        rows.append(["all PATCHes per job", f"{_patches(harness) / num_jobs:.2f}", "", ""])
        rows.append(["operator CPU so far", f"{_cpu_s(harness):.1f} s", "", ""])
        rows.append(["operator RSS", f"{_rss_mib(harness):.0f} MiB", "reported", "≤ 200 MiB"])
        rows += await _restart(harness, load)
        orchestrator.kill()
        rows += await load.latency(num_reports)
        rows.append(["operator RSS at the end", f"{_rss_mib(harness):.0f} MiB", "reported", "≤ 200 MiB"])
    return rows


async def _restart(harness: OperatorHarness, load: Load) -> list[list[object]]:
    assert harness.operator is not None
    harness.operator.kill()
    began = time.monotonic()
    harness.start_operator()
    await load.ready()
    ready_s = time.monotonic() - began
    steady_at = await load.idle()
    return [
        ["restart → caches complete", f"{ready_s:.1f} s", "", ""],
        ["restart → every job reconciled", f"{steady_at - began:.1f} s", "≤ 20 s", "≤ 5 s"],
        ["PATCHes written by the restart", f"{_patches(harness):.0f}", "0", "0"],
        ["operator CPU of the restart", f"{_cpu_s(harness):.1f} s", "", ""],
        ["operator RSS after the restart", f"{_rss_mib(harness):.0f} MiB", "reported", "≤ 200 MiB"],
    ]


def _patches(harness: OperatorHarness) -> float:
    return harness.metric("marlaas_operator_api_requests_total", verb="PATCH")


def _rss_mib(harness: OperatorHarness) -> float:
    assert harness.operator is not None
    return float(psutil.Process(harness.operator.pid).memory_info().rss) / 2**20


def _cpu_s(harness: OperatorHarness) -> float:
    assert harness.operator is not None
    times = psutil.Process(harness.operator.pid).cpu_times()
    return float(times.user + times.system)


@contextlib.asynccontextmanager
async def _orchestrator(harness: OperatorHarness) -> AsyncIterator[Orchestrator]:
    bus = await harness.connect_orchestrator()
    await bus.close()
    orchestrator = Orchestrator(harness)
    orchestrator.start()
    try:
        yield orchestrator
    finally:
        orchestrator.kill()


async def run_memory(num_jobs: int) -> None:
    with ControlPlane() as plane:
        serve_kinds(plane)
        async with rigged(plane, forks=False) as harness:
            print(table(["what", "measured", "must", "aim"], await measure_memory(harness, num_jobs)))


async def run(num_jobs: int, num_reports: int, round_s: tuple[float, float]) -> None:
    first_s, later_s = round_s
    with ControlPlane() as plane:
        serve_kinds(plane)
        async with rigged(plane, forks=False) as harness:
            rows = await measure(harness, num_jobs, num_reports)
    rows.append(["10,000 jobs, 100 Tenants: first round", f"{first_s:.1f} s", "", ""])
    rows.append(["10,000 jobs, 100 Tenants: a round", f"{later_s:.2f} s", "≤ 0.5 s", ""])
    print(table(["what", "measured", "must", "aim"], rows))


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("operator_scale", __doc__)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--reports", type=int, default=200, help="progress reports whose way into a GET is timed")
    parser.add_argument("--large", action="store_true", help="only memory, with jobs of the largest allowed size")
    chosen = parser.parse_args(arguments)
    if chosen.large:
        asyncio.run(run_memory(chosen.jobs))
        return
    asyncio.run(run(chosen.jobs, chosen.reports, round_seconds(10_000, 100)))
