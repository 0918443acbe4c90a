"""Many jobs of four tenants: together against one after another, strict, asynchronous, in lock-step, and by the commit before.

Every mode runs the same jobs with the same seeds: `calculator`, 8 episodes a step, up to 3 turns of at most 32 tokens,
with tools that wait. Modes of one workload run one after another in this invocation. Results are kept under --out, and
complete runs are not repeated. All figures are computed from the runs' raw events (`multitenant_figures`).

A: one after another, strict. B: one after another, maxStaleness 1. C: together, with a barrier after each step.
D: together, strict and maxStaleness 1. O: A and D (strict) by the commit before (--before, a worktree in the cache).
T: TRL's GRPOTrainer, one job after another.
"""

import argparse
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from bench import multitenant_figures as figures
from bench import options
from bench.multitenant_runs import BEFORE, CACHE, run
from bench.multitenant_trl import rate as trl_rate
from bench.multitenant_workload import MODES, Mode, Workload, name_of
from bench.runs import table

CORES = len(os.sched_getaffinity(0))
HEADERS = [
    "jobs",
    "tools",
    "mode",
    "steps/s",
    "× A",
    "bound",
    "share",
    "first result p50 / max",
    "engine busy",
    "batch",
]
ROLES = ("sandbox", "rollout", "trainer", "nats-server", "orchestrator", "runner")


def main(arguments: Sequence[str] = ()) -> None:
    chosen = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the run underway is ended too
    for num_jobs, wait_s in itertools.product(chosen.jobs, chosen.waits):
        workload = Workload(num_jobs, wait_s, chosen.steps, chosen.seed)
        found: dict[Mode, figures.Events] = {}
        for mode in MODES:
            if mode.letter in chosen.modes:
                found[mode] = figures.load(run(workload, mode, chosen.out, chosen.slots, chosen.before).folder)
        if found:
            print(f"\n{report(workload, found)}\n\n{costs(found)}", flush=True)
        if "T" in chosen.modes:
            print(f"\n{workload} T: {trl_rate(workload, chosen.out, CORES):.2f} steps/s", flush=True)


def report(workload: Workload, found: dict[Mode, figures.Events]) -> str:
    """Return the table of rates."""
    base = next((events for mode, events in found.items() if mode.letter == "A"), None)
    alone = next((events for mode, events in found.items() if mode.letter == "B"), None)
    rows = []
    for mode, events in found.items():
        rate = _rate(mode, events)
        limit = ""
        if base is not None and alone is not None and mode.together:
            limit = f"{figures.bound(base, workload.num_jobs, figures.rate_one_by_one(alone), CORES):.2f}"
        firsts = figures.first_results_s(events)
        rows.append(
            [
                workload.num_jobs,
                f"{workload.wait_s:g} s",
                name_of(mode),
                f"{rate:.2f}",
                f"{rate / figures.rate_one_by_one(base):.2f}" if base is not None else "",
                limit,
                f"{rate / float(limit):.0%}" if limit else "",
                f"{figures.percentile(firsts, 0.5):.1f} / {firsts[-1]:.1f} s" if mode.together else "",
                f"{figures.busy_share(events):.0%}",
                f"{figures.occupancy(events):.1f}",
            ]
        )
    return table(HEADERS, rows)


def costs(found: dict[Mode, figures.Events]) -> str:
    """Return the tables of processor time and memory by role."""
    rows = []
    for mode, events in found.items():
        seconds, start = figures.cpu_s(events), figures.start_cpu_s(events)
        episodes, memory = figures.num_episodes(events), figures.memory_bytes(events)
        cells = [
            f"{1000 * seconds.get(role, 0.0) / episodes:.1f} ({start.get(role, 0.0):.0f}; {memory.get(role, 0) >> 20})"
            for role in ROLES
        ]
        rows.append([name_of(mode), *cells, f"{fmean(_lengths(events)):.1f}"])
    return "CPU ms an episode (CPU s before the first turn; peak MiB)\n\n" + table(["mode", *ROLES, "turns"], rows)


def _lengths(events: figures.Events) -> list[int]:
    return [len(episode.turns) for job in events.jobs.values() for episode in job.episodes]


def _rate(mode: Mode, events: figures.Events) -> float:
    return figures.rate_together(events) if mode.together else figures.rate_one_by_one(events)


def _parser() -> argparse.ArgumentParser:
    parser = options("multitenant", __doc__)
    letters = sorted({"T", *(mode.letter for mode in MODES)})
    parser.add_argument("--jobs", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--waits", nargs="+", type=float, default=[0.0, 0.4, 1.0], help="median seconds of a tool call")
    parser.add_argument("--modes", nargs="+", choices=letters, default=letters)
    parser.add_argument("--steps", type=int, default=6, help="steps of each job; default: %(default)s")
    parser.add_argument("--slots", type=int, default=16, help="adapter slots of the engine; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help="for mode O; default: %(default)s")
    parser.add_argument("--out", type=Path, default=CACHE / "multitenant", help="default: %(default)s")
    return parser
