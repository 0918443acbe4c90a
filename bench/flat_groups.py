"""`training.flatGroups`: excluded against counted, on `reverse` without replacements of flat groups (maxRefill 0), three seeds.

Strict jobs of one run side by side, one for each algorithm and value; a job's results do not depend on its neighbours. Prints
the share of groups with signal, the held-out reward during training and at its end, and the mean of the trained rewards.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bench import options
from bench.runs import documents, print_table, strict_jobs
from bench.sources import ROOT

KEPT = ROOT / "runs" / "flat_groups"
SETTINGS = [(algorithm, value) for algorithm in ("dapo", "grpo") for value in ("excluded", "counted")]
HEADERS = [
    "algorithm",
    "flatGroups",
    "groups with signal",
    "seed",
    "held out, over the run",
    "at the end",
    "trained rewards",
]
EVERY = 4


def manifests(steps: int) -> list[dict[str, Any]]:
    """Return the pool and a job for each setting."""
    pool, *_, job, _ = documents("quickstart.yaml")
    pool["spec"]["adapterSlots"] = 3 * len(SETTINGS)
    return [pool, *(_job(job, algorithm, value, steps) for algorithm, value in SETTINGS)]


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("flat_groups", __doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=28, help="default: 28")
    chosen = parser.parse_args(arguments)
    found = {seed: strict_jobs(KEPT / f"{seed}.json", manifests(chosen.steps), seed) for seed in chosen.seeds}
    print_table(
        HEADERS,
        [_row(algorithm, value, seed, jobs) for algorithm, value in SETTINGS for seed, jobs in found.items()],
    )


def _job(job: dict[str, Any], algorithm: str, value: str, steps: int) -> dict[str, Any]:
    name = f"{algorithm}-{value}"
    training = job["spec"]["training"] | {
        "algorithm": algorithm,
        "flatGroups": value,
        "maxRefill": 0,
        "maxStaleness": 0,
        "steps": steps,
    }
    spec = job["spec"] | {"training": training, "evaluation": {"every": EVERY, "tasks": 64}}
    return job | {"metadata": {"name": name, "namespace": f"team-{name}"}, "spec": spec}


def _row(algorithm: str, value: str, seed: int, jobs: dict[str, Any]) -> list[object]:
    name = f"{algorithm}-{value}"
    job = jobs[f"team-{name}/{name}"]
    rewards = [one["reward_mean"] for one in job["evals"]]
    signal = fmean(one["num_groups"] / (one["num_groups"] + one["num_zero_variance"]) for one in job["steps"])
    trained = fmean(one["reward_mean"] for one in job["steps"])
    return [
        algorithm,
        value,
        f"{signal:.0%}",
        seed,
        f"{fmean(rewards[1:]):.3f}",
        f"{rewards[-1]:.3f}",
        f"{trained:.3f}",
    ]
