"""`distill`: training steps until the held-out reward of `reverse` is 0.9, by RL, and from the adapter that RL has made.

Two strict runs for each seed: the teacher's, then the student's (examples/distill). A step of both has 64 episodes.
"""

from collections.abc import Sequence
from typing import Any

from bench import options
from bench.runs import documents, print_table, strict_jobs
from bench.sources import ROOT

KEPT = ROOT / "runs" / "distill"
REACHED = 0.9
EVERY = 1
STEPS = {"teacher": 24, "student": 8}
HEADERS = [
    "job",
    "seed",
    "before",
    "after 2",
    "after 4",
    "steps to 0.9",
    "at the end",
    "teacher_kl, first and last step",
]


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("distill", __doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    chosen = parser.parse_args(arguments)
    rows = []
    for seed in chosen.seeds:
        for name in STEPS:
            jobs = strict_jobs(KEPT / f"{name}-{seed}.json", manifests(name, seed), seed)
            rows.append(_row(name, seed, jobs[f"team-a/{name}"]))
    print_table(HEADERS, rows)


def manifests(name: str, seed: int) -> list[dict[str, Any]]:
    """Return the objects of an example, for a strict run."""
    *pools, job = documents(f"distill/{name}.yaml")
    spec, adapter = job["spec"], {"path": str(KEPT / f"adapter-{seed}")}
    spec["training"] |= {"maxStaleness": 0, "steps": STEPS[name]}
    spec["evaluation"] |= {"every": EVERY}
    if name == "teacher":
        spec["export"] = adapter
    else:
        spec["agents"][-1]["initFrom"] = adapter
    return [*pools, job]


def _row(name: str, seed: int, job: dict[str, Any]) -> list[object]:
    evals = {one["step"]: one["reward_mean"] for one in job["evals"]}
    kl = [step["metrics"].get("policy/teacher_kl") for step in job["steps"]]
    reached = next((step for step in sorted(evals) if evals[step] >= REACHED), "not reached")
    shown = [f"{evals[step]:.2f}" for step in (0, 2, 4)]
    divergence = "" if kl[0] is None else f"{kl[0]:.2f}, {kl[-1]:.2f}"
    return [name, seed, *shown, reached, f"{evals[max(evals)]:.2f}", divergence]
