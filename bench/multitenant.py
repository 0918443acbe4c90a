"""Many jobs of four tenants: together against one after another, strict, asynchronous, in lock-step, and by the commit before.

Every mode runs the same jobs with the same seeds: `calculator`, 8 episodes a step, up to 3 turns of at most 32 tokens,
with tools that wait. In each round, the modes of a workload alternate. Runs are kept under --out, and complete runs of the
same sources are not repeated. All figures are computed from the runs' raw events (`multitenant_figures`).

A: one after another, strict. B: one after another, maxStaleness 1. C: together, with a barrier after each step.
D: together, strict and maxStaleness 1. O: A and D (strict) by the commit before (--before, a worktree in the cache).
T: TRL's GRPOTrainer, one job after another.

Beside the rate of jobs together are printed: min(jobs × B's rate, cores / CPU seconds of a step in A), the issue's formula,
which can be exceeded, because beside others a step costs less CPU than alone; and cores / CPU seconds of a step in the mode
itself, which cannot: its share is the busy share of the cores.

After the rates: CPU by role; the engine's start, the share of its time that re-loads of adapters took (first loads do not
count), and its queues; the time from a version's commit to its first token (`multitenant_versions`); at the end D's
rates against other modes and fewer jobs, and memory by role and number of jobs (--jobs 1 8 32). Pictures: multitenant.png, multitenant-occupancy.png (A and D of the last workload).

--weights 1 1 2 4 measures shares instead (`multitenant_shares`), and draws multitenant-shares.png.
"""

import argparse
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from bench import multitenant_pictures as pictures
from bench import multitenant_report as reports
from bench import multitenant_shares, multitenant_versions, options
from bench.multitenant_figures import Events, load
from bench.multitenant_runs import BEFORE, RunSetting, run
from bench.multitenant_trl import rate as trl_rate
from bench.multitenant_workload import MODES, Mode, Workload, name_of
from bench.rounds import spread
from bench.sources import CACHE, ROOT

CORES = len(os.sched_getaffinity(0))


def main(arguments: Sequence[str] = ()) -> None:
    chosen = _parser().parse_args(arguments)
    chosen.pictures.mkdir(parents=True, exist_ok=True)
    setting = RunSetting(chosen.out, chosen.slots, chosen.before, reuse=chosen.reuse)
    if chosen.weights:
        weights = tuple(chosen.weights)
        workload = Workload(
            chosen.jobs[0], chosen.waits[0], multitenant_shares.ENDLESS, chosen.seed, weights, chosen.max_seqs
        )
        picture = chosen.pictures / "multitenant-shares.png"
        multitenant_shares.measure(workload, setting, chosen.seconds, chosen.rounds, picture)
        return
    found: dict[Workload, reports.Outlines] = {}
    for num_jobs, wait_s in itertools.product(chosen.jobs, chosen.waits):
        workload = Workload(num_jobs, wait_s, chosen.steps, chosen.seed)
        found[workload] = _measure(workload, chosen, setting)
    if any(found.values()):
        print(f"\n{reports.comparisons(found)}\n\n{reports.memory(found)}")
        pictures.draw_rates(found, chosen.pictures / "multitenant.png")


def _measure(workload: Workload, chosen: argparse.Namespace, setting: RunSetting) -> reports.Outlines:
    """Measure the modes of a workload in each round, and print its tables."""
    modes = [mode for mode in MODES if mode.letter in chosen.modes]
    folders: dict[Mode, list[Path]] = {mode: [] for mode in modes}
    trl_rates = []
    for number in range(chosen.rounds):
        for mode in modes:
            folders[mode].append(run(workload, mode, setting, number))
        if "T" in chosen.modes:
            trl_rates.append(trl_rate(workload, chosen.out, CORES, number))
    found = {mode: [load(folder) for folder in kept] for mode, kept in folders.items()}
    if found:
        tables = [reports.rates(workload, found, CORES), reports.costs(found), reports.engines(found)]
        print("\n" + "\n\n".join([*tables, _versions(folders, found)]))
        last = {name_of(mode): kept[-1] for mode, kept in folders.items() if mode.letter in "AD" and not mode.before}
        if last:
            pictures.draw_occupancy(last, chosen.pictures / "multitenant-occupancy.png")
    if trl_rates:
        print(f"\n{workload} T: {spread(trl_rates)} steps/s", flush=True)
    return reports.outlines(found)


def _versions(folders: dict[Mode, list[Path]], found: dict[Mode, list[Events]]) -> str:
    delivered = {
        mode: [
            one
            for folder, events in zip(folders[mode], rounds, strict=True)
            for one in multitenant_versions.deliveries(multitenant_versions.versions_of(folder), events)
        ]
        for mode, rounds in found.items()
        if not mode.before
    }
    return multitenant_versions.report(delivered)


def _parser() -> argparse.ArgumentParser:
    parser = options("multitenant", __doc__)
    letters = sorted({"T", *(mode.letter for mode in MODES)})
    parser.add_argument("--jobs", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--waits", nargs="+", type=float, default=[0.0, 0.4, 1.0], help="median seconds of a tool call")
    parser.add_argument("--modes", nargs="+", choices=letters, default=letters)
    parser.add_argument("--rounds", type=int, default=1, help="of all modes; default: %(default)s")
    parser.add_argument("--steps", type=int, default=6, help="steps of each job; default: %(default)s")
    parser.add_argument("--slots", type=int, default=16, help="adapter slots of the engine; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help="for mode O; default: %(default)s")
    parser.add_argument("--out", type=Path, default=CACHE / "multitenant", help="default: %(default)s")
    parser.add_argument("--reuse", action="store_true", help="accept kept runs of other sources too")
    parser.add_argument(
        "--pictures", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures; default: docs/images"
    )
    weights = parser.add_argument_group("shares by weight")
    weights.add_argument("--weights", nargs=4, type=float, help="of the tenants; with the first of --jobs and --waits")
    weights.add_argument("--seconds", type=float, default=300.0, help="measured time; default: %(default)s")
    weights.add_argument("--max-seqs", type=int, default=8, help="sequences decoded at once; default: %(default)s")
    return parser
