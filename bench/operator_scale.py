"""The operator at scale, on a real API server with a real orchestrator: 2,000 queued RLJobs, a restart, and how fast progress shows.

    python -m bench operator_scale [--jobs N] [--reports N]

etcd and kube-apiserver (no nodes), nats-server with users, orchestrator and operator as processes of this machine. `steady`: every job has
the status that says why it waits, and nothing has been written for a second. PATCHes are the API server's answers as the operator counted them. Latency: from
the orchestrator's write of a job's progress on the bus until a GET of the job shows it, GETs 20 ms apart.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import psutil
from tests.operator.conftest import install_kinds
from tests.operator.real.rig import Rig, rigged

from bench import options
from bench.operator_load import Load, Orchestrator
from bench.runs import table
from marlaas_e2e.control_plane import ControlPlane

NAMESPACES = 20


async def measure(rig: Rig, num_jobs: int, num_reports: int) -> list[list[object]]:
    rows: list[list[object]] = []
    async with _orchestrator(rig) as orchestrator:
        load = Load(rig, num_jobs, NAMESPACES)
        await load.prepare()
        began = time.monotonic()
        rig.start_operator()
        await load.ready()
        rows.append(["operator start, nothing to do", f"{time.monotonic() - began:.1f} s", "", ""])
        created_s = await load.create()
        last_apply = time.monotonic()
        steady_at = await load.steady()
        rows.append([f"{num_jobs} RLJobs created in", f"{created_s:.1f} s", "", ""])
        rows.append(["last apply → all statuses steady", f"{steady_at - last_apply:.1f} s", "≤ 30 s", "≤ 8 s"])
        writes = rig.metric("marlaas_operator_api_requests_total", verb="PATCH", resource="rljobs/status")
        rows.append(["status PATCHes per job", f"{writes / num_jobs:.2f}", "≤ 2", "1"])
        rows.append(["all PATCHes per job", f"{_patches(rig) / num_jobs:.2f}", "", ""])
        rows.append(["operator CPU so far", f"{_cpu_s(rig):.1f} s", "", ""])
        rows.append(["operator RSS", f"{_rss_mib(rig):.0f} MiB", "reported", "≤ 200 MiB"])
        rows += await _restart(rig, load)
        orchestrator.kill()
        rows += await load.latency(num_reports)
        rows.append(["operator RSS at the end", f"{_rss_mib(rig):.0f} MiB", "reported", "≤ 200 MiB"])
    return rows


async def _restart(rig: Rig, load: Load) -> list[list[object]]:
    assert rig.operator is not None
    rig.operator.kill()
    began = time.monotonic()
    rig.start_operator()
    await load.ready()
    ready_s = time.monotonic() - began
    steady_at = await load.idle()
    return [
        ["restart → caches complete", f"{ready_s:.1f} s", "", ""],
        ["restart → every job reconciled", f"{steady_at - began:.1f} s", "≤ 20 s", "≤ 5 s"],
        ["PATCHes written by the restart", f"{_patches(rig):.0f}", "0", "0"],
        ["operator CPU of the restart", f"{_cpu_s(rig):.1f} s", "", ""],
        ["operator RSS after the restart", f"{_rss_mib(rig):.0f} MiB", "reported", "≤ 200 MiB"],
    ]


def _patches(rig: Rig) -> float:
    return rig.metric("marlaas_operator_api_requests_total", verb="PATCH")


def _rss_mib(rig: Rig) -> float:
    assert rig.operator is not None
    return float(psutil.Process(rig.operator.pid).memory_info().rss) / 2**20


def _cpu_s(rig: Rig) -> float:
    assert rig.operator is not None
    times = psutil.Process(rig.operator.pid).cpu_times()
    return float(times.user + times.system)


@contextlib.asynccontextmanager
async def _orchestrator(rig: Rig) -> AsyncIterator[Orchestrator]:
    bus = await rig.connect_orchestrator()
    await bus.close()
    orchestrator = Orchestrator(rig)
    orchestrator.start()
    try:
        yield orchestrator
    finally:
        orchestrator.kill()


async def run(num_jobs: int, num_reports: int) -> None:
    with ControlPlane() as plane:
        await install_kinds(plane)
        async with rigged(plane) as rig:
            rows = await measure(rig, num_jobs, num_reports)
    print(table(["what", "measured", "must", "aim"], rows))


def main(words: Sequence[str] = ()) -> None:
    parser = options("operator_scale", __doc__)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--reports", type=int, default=200, help="progress reports whose way into a GET is timed")
    chosen = parser.parse_args(words)
    asyncio.run(run(chosen.jobs, chosen.reports))
