"""Pacing against dropping in real runs of the tiny model: `python -m bench staleness --runs` and `--halves`.

runs: one job whose episodes call tools that wait for log-normal times (sigma 1): strict, and with `maxStaleness` 2 with
dropping, with pacing, and with pacing and `refresh: turn`. Printed are the time of a step, steps a second against strict and
against dropping, the groups that were dropped, and the staleness of the trained tokens.

halves: one job, half of whose tasks take long. Printed is the held-out reward of both halves after the same number of steps.
"""

import copy
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from bench.runs import documents, finished, kept, print_table, run
from bench.sources import CACHE, ROOT, python_path

BOUND, CALLS, MEDIAN_S, WARM_UP = 2, 8, 1.0, 3
VARIANTS: Mapping[str, dict[str, Any]] = {
    "strict": {"staleness": 0},
    "dropping": {"staleness": BOUND, "changes": "dropping"},
    "pacing": {"staleness": BOUND},
    "pacing, refresh: turn": {"staleness": BOUND, "refresh": "turn"},
}
_FOLDER = CACHE / "staleness"


def manifest(variant: Mapping[str, Any], environment: Mapping[str, Any], steps: int, evaluated: int) -> list[Any]:
    """Return the pool and the job of a run. evaluated: held-out tasks."""
    pool, *_, job = copy.deepcopy(documents("quickstart.yaml"))
    spec = job["spec"]
    spec["environment"] = dict(environment)
    spec["rollout"] = {"groupSize": 8, "maxTurns": CALLS, "maxTokens": 16, "refresh": variant.get("refresh", "group")}
    spec["training"] |= {"steps": steps, "groupsPerStep": 8, "maxStaleness": variant["staleness"]}
    spec["evaluation"] = {"every": steps, "tasks": evaluated}
    return [pool, job]


def train(name: str, environment: Mapping[str, Any], steps: int, evaluated: int, seed: int) -> dict[str, Any]:
    """Return the records of a run's steps and evaluations."""
    wanted = manifest(VARIANTS[name], environment, steps, evaluated)
    changes = str(VARIANTS[name].get("changes", ""))
    path = {"PYTHONPATH": python_path(ROOT, ROOT / "bench")}

    def new() -> dict[str, Any]:
        result = finished(run(wanted, seed=seed, env=path, changes=changes))
        (job,) = result.jobs()
        return {"steps": result.records[job], "evals": result.evals[job]}

    words = f"{environment['name'].partition(':')[2]}-{name.replace(': ', '-').replace(', ', '-')}-{seed}"
    return kept(_FOLDER / f"{words}.json", [wanted, changes, seed], new)


def measure_runs(steps: int) -> None:
    """Run each variant once, and print a row for it."""
    environment = {"name": "staleness_env:chat", "args": {"calls": CALLS, "median_s": MEDIAN_S}}
    print(f"\n{CALLS} turns an episode, a tool of median {MEDIAN_S:g} s after each\n")
    head = [
        "steps",
        "time a step",
        "steps/s to strict",
        "to dropping",
        "groups dropped",
        "their time to trained",
        "token staleness",
    ]
    found = {name: train(name, environment, steps, 0, 0)["steps"] for name in VARIANTS}
    times = {name: _step_s(records) for name, records in found.items()}
    print_table(
        head,
        (
            [
                name,
                f"{times[name]:.1f} s",
                f"{times['strict'] / times[name]:.2f}",
                f"{times['dropping'] / times[name]:.2f}",
                *_dropped(records),
                f"{fmean(one['metrics'].get('token_staleness', 0.0) for one in records):.2f}",
            ]
            for name, records in found.items()
        ),
    )


def measure_halves(steps: int, seeds: Sequence[int]) -> None:
    """Train with dropping and with pacing, and print the held-out reward of both halves."""
    environment = {"name": "staleness_env:halves", "args": {"median_s": MEDIAN_S}}
    print(f"\nhalf of the tasks wait for a tool of median {MEDIAN_S:g} s; held-out reward after {steps} steps\n")
    rows = []
    for seed in seeds:
        for name in ("dropping", "pacing"):
            found = train(name, environment, steps, 128, seed)
            first, last = (found["evals"][at]["metrics"] for at in (0, -1))
            ends = [f"{one[half]:.3f}" for half in ("long", "short") for one in (first, last)]
            rows.append([name, seed, *ends, *_dropped(found["steps"]), f"{_step_s(found['steps']):.1f} s"])
    print_table(
        [
            "steps",
            "seed",
            "long before",
            "after",
            "short before",
            "after",
            "groups dropped",
            "their time to trained",
            "time a step",
        ],
        rows,
    )


def _step_s(records: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean time of a step after the warm-up, in seconds."""
    return float(records[-1]["at"] - records[WARM_UP - 1]["at"]) / (len(records) - WARM_UP)


def _dropped(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the share of groups with signal that were dropped, and their mean time against the trained ones'."""
    trained, dropped = ([one["plays"][kind] for one in records] for kind in ("trained", "dropped"))
    num_dropped, num_trained = (sum(one["num_groups"] for one in kind) for kind in (dropped, trained))
    seconds = [sum(one["seconds"] * one["num_groups"] for one in kind) for kind in (dropped, trained)]
    ratio = seconds[0] / num_dropped / (seconds[1] / num_trained) if num_dropped else None
    return [f"{num_dropped / (num_dropped + num_trained):.0%}", "" if ratio is None else f"{ratio:.2f}"]
