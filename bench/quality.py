"""Quality of many jobs together: the held-out reward of each of 32 asynchronous jobs beside the others, and of the same job alone.

`calculator` with one set of seeds a job, 8 episodes a step, tools that do not wait, 64 held-out tasks. alone: one job after
another (mode B of `multitenant`). together: all at once (mode D, maxStaleness 1). The difference is paired by job. Runs are
kept under --out, and complete ones of the same sources are not repeated.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from bench import options
from bench.multitenant_figures import Events, load
from bench.multitenant_runs import RunSetting, run
from bench.multitenant_workload import MODES, Mode, Workload
from bench.runs import table
from bench.sources import CACHE

TASKS, MUST = 64, 0.02
HEADERS = ["seed", "jobs", "before", "alone", "together", "difference", "standard error", f"difference ≤ {MUST}"]


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("quality", __doc__)
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60, help="of each job; default: %(default)s")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--slots", type=int, default=16, help="adapter slots of the engine; default: %(default)s")
    parser.add_argument("--out", type=Path, default=CACHE / "quality", help="default: %(default)s")
    parser.add_argument("--reuse", action="store_true", help="accept kept runs of other sources too")
    chosen = parser.parse_args(arguments)
    setting = RunSetting(chosen.out, chosen.slots, reuse=chosen.reuse)
    found: dict[int, tuple[Evals, Evals]] = {}
    for seed in chosen.seeds:
        workload = Workload(chosen.jobs, 0.0, chosen.steps, seed)
        alone, together = (evals(load(run(workload, mode, setting))) for mode in (mode_of("B"), mode_of("D")))
        found[seed] = alone, together
        print("\n" + table(HEADERS, [row(str(seed), alone, together)]), flush=True)
    every = [{(seed, job): one for seed, pair in found.items() for job, one in pair[side].items()} for side in (0, 1)]
    print("\n" + table(HEADERS, [row("all", *every)]) + "\n", flush=True)


Evals = Mapping[Any, tuple[float, float]]
"""By job, the mean reward on held-out tasks before and after training."""


def mode_of(letter: str) -> Mode:
    """Return the asynchronous mode of this letter, with evaluations."""
    (mode,) = (one for one in MODES if one.letter == letter and not one.strict and not one.before)
    return replace(mode, evals=TASKS)


def evals(events: Events) -> Evals:
    """Return each job's first and last evaluation."""
    return {name: (job.evals[0], job.evals[-1]) for name, job in events.jobs.items()}


def row(name: str, alone: Evals, together: Evals) -> list[str]:
    """Return a row of the table. The difference is of the results after training, together minus alone, paired by job."""
    differences = [together[job][1] - after for job, (_, after) in alone.items()]
    mean, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    before, after = (fmean(one[at] for one in alone.values()) for at in (0, 1))
    beside = fmean(one[1] for one in together.values())
    numbers = [f"{number:.3f}" for number in (before, after, beside)]
    verdict = "met" if abs(mean) <= MUST else "missed"
    return [name, str(len(differences)), *numbers, f"{mean:+.4f}", f"{error:.4f}", verdict]
