"""Shares of tenants with weights on the real engine: `python -m bench multitenant --weights 1 1 2 4`.

As many jobs in each of the four tenants, asynchronous, with more steps than fit into the measured time, so that all tenants
stay active. The engine decodes few sequences at once (--max-seqs), so that requests queue. Mode D as it is, and with the
requests of all tenants in one queue (first come, first served: a change that only the bench makes, see `bench.changed_run`),
alternating. Service and windows are those of `bench fairness`: tokens outside the engine's prefix cache and generated
ones, of tenants that had queued requests throughout a window of 60 s. A gap of less than a second between two queued requests
does not count as idle. The measured time begins when every job has made a step.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench import fairness
from bench.fairness import Log
from bench.multitenant_figures import Events, jain, load
from bench.multitenant_pictures import draw_tenants
from bench.multitenant_runs import RunSetting, run
from bench.multitenant_workload import Mode, Workload
from marlaas.plots.series import Interval, union

MODES = {
    "by weight": Mode("D", strict=False, together=True),
    "first come, first served": Mode("F", strict=False, together=True, changes=("first-come",)),
}
GAP_S, TAIL_S = 1.0, 30.0
"""TAIL_S: the run goes on after the measured time, because the turns of unfinished episodes are not recorded."""
ENDLESS = 10_000


@dataclass(slots=True)
class ShareDriver:
    """Stops a run so many seconds after every job has made its first step."""

    num_jobs: int
    seconds: float
    _began: float | None = field(default=None)

    def settings(self) -> Mapping[str, Any]:
        return {"num_jobs": self.num_jobs, "seconds": self.seconds}

    def look(self, out: Path) -> bool:
        stepped = [path for path in out.glob("*/*/steps.jsonl") if path.stat().st_size]
        if self._began is None and len(stepped) == self.num_jobs:
            self._began = time.monotonic()
        return self._began is not None and time.monotonic() > self._began + self.seconds + TAIL_S


def measure(workload: Workload, setting: RunSetting, seconds: float, rounds: int, picture: Path) -> None:
    """Measure both orders in each round; print a table for each round, and the targets over all."""
    found: list[dict[str, Log]] = []
    weights = dict(zip((f"team-{number}" for number in range(len(workload.weights))), workload.weights, strict=True))
    for number in range(rounds):
        folders = {
            name: run(workload, mode, setting, number, ShareDriver(workload.num_jobs, seconds))
            for name, mode in MODES.items()
        }
        found.append({name: log_of(_checked(load(folder)), seconds) for name, folder in folders.items()})
        print(f"\nround {number}\n\n{fairness.report(found[-1], weights, seconds)}", flush=True)
        draw_tenants(folders["by weight"], workload.weights, picture)
    print(f"\n{targets(found, weights, seconds)}")


def _checked(events: Events) -> Events:
    longest_s = max(episode.duration_s for job in events.jobs.values() for episode in job.episodes)
    if longest_s > TAIL_S:
        print(
            f"the longest episode took {longest_s:.0f} s, so turns at the end may be missing: use fewer jobs, or more --max-seqs"
        )
    return events


def log_of(events: Events, seconds: float) -> Log:
    """Return the service, and the times without a queued request, of the measured time; times are since its begin."""
    begin = max(job.steps[0] for job in events.jobs.values())
    log = Log()
    waits: dict[str, list[Interval]] = {}
    for job in events.jobs.values():
        for turn in (turn for episode in job.episodes for turn in episode.turns):
            end, cost = turn.at - begin, turn.num_prompt_tokens - turn.num_cached_tokens + len(turn.output_ids)
            entered = end - turn.engine_s
            waits.setdefault(job.tenant, []).append((entered - turn.queue_s, entered))
            if 0.0 <= end < seconds:
                log.served.append((end, job.tenant, cost))
    log.idle = {tenant: _gaps(intervals, seconds) for tenant, intervals in waits.items()}
    return log


def _gaps(intervals: Sequence[Interval], seconds: float) -> list[Interval]:
    """Return the times of at least GAP_S between intervals, from 0 on."""
    busy = [(low, high) for low, high in union(intervals, GAP_S) if high > 0.0 and low < seconds]
    edges = [0.0, *(edge for one in busy for edge in one), seconds]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if high - low >= GAP_S]


def targets(found: Sequence[Mapping[str, Log]], weights: dict[str, float], seconds: float) -> str:
    """Return a sentence about each target, over all rounds."""
    windows = {name: [fairness.windows(one[name], weights, seconds) for one in found] for name in MODES}
    if not all(one for rounds in windows.values() for one in rounds):
        return "no window in which two tenants had queued requests throughout: use more jobs, or a smaller --max-seqs"
    fair, first_come = ([max(one.difference for one in each) for each in windows[name]] for name in MODES)
    indices = [fmean(jain(list(one.services.values())) for one in each) for each in windows["by weight"]]
    rates = [fairness.rate(one["by weight"], seconds) / fairness.rate(one[list(MODES)[1]], seconds) for one in found]
    difference = median(own / base for own, base in zip(fair, first_come, strict=True))
    return (
        f"largest difference against first come, first served: {difference:.0%} (≤ 50 %)\n"
        f"throughput against first come, first served: {median(rates):.1%} (≥ 97 %)\n"
        f"Jain's index over active tenants, mean: {median(indices):.3f} (≥ 0.95, aim 0.99)"
    )
