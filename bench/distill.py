"""`distill`: training episodes until the held-out reward of `reverse` is 0.9, by RL, and from the adapter that RL has made.

Two strict runs for each seed: the teacher's, with 64 episodes a step, then the student's (examples/distill) beside RL with as many
episodes as the student has, 16 a step.
"""

from collections.abc import Sequence
from typing import Any

from bench import options
from bench.runs import documents, print_table, strict_jobs
from bench.sources import ROOT

KEPT = ROOT / "runs" / "distill"
REACHED = 0.9
STEPS = 12, 16
"""Of the teacher, and of the jobs beside each other."""
HEADERS = [
    "job",
    "seed",
    "episodes a step",
    "before",
    "after 4 steps",
    "after 8",
    "episodes to 0.9",
    "at the end",
    "teacher_kl",
]


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("distill", __doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    chosen = parser.parse_args(arguments)
    rows = []
    for seed in chosen.seeds:
        adapter = {"path": str(KEPT / f"adapter-{seed}")}
        found = strict_jobs(KEPT / f"teacher-{seed}.json", teacher(adapter), seed)
        found |= strict_jobs(KEPT / f"student-{seed}.json", students(adapter), seed)
        rows += [_row(name, seed, job) for name, job in found.items()]
    print_table(HEADERS, rows)


def teacher(adapter: dict[str, str]) -> list[dict[str, Any]]:
    """Return the pool and the job that makes the adapter."""
    pool, job = documents("distill/teacher.yaml")
    return [pool, _strict(job, STEPS[0], export=adapter)]


def students(adapter: dict[str, str]) -> list[dict[str, Any]]:
    """Return the pools, the student of the adapter, and RL with as many episodes."""
    small, large, job = documents("distill/student.yaml")
    job["spec"]["agents"][-1]["initFrom"] = adapter
    _, alone = documents("distill/teacher.yaml")
    training = alone["spec"]["training"] | {"groupsPerStep": 2, "maxRefill": 0}
    few = alone | {"metadata": {"name": "rl", "namespace": "team-b"}}
    return [small, large, _strict(job, STEPS[1]), _strict(few, STEPS[1], training=training)]


def _strict(job: dict[str, Any], steps: int, **spec: object) -> dict[str, Any]:
    made = {key: value for key, value in job["spec"].items() if key != "export"} | spec
    made["training"] = made["training"] | {"maxStaleness": 0, "steps": steps}
    return job | {"spec": made | {"evaluation": {"every": 1, "tasks": 64}}}


def _row(name: str, seed: int, job: dict[str, Any]) -> list[object]:
    evals = {one["step"]: one["reward_mean"] for one in job["evals"]}
    played = [0]
    for step in job["steps"]:
        played.append(played[-1] + step["num_episodes"])
    kl = [step["metrics"]["policy/teacher_kl"] for step in job["steps"] if "policy/teacher_kl" in step["metrics"]]
    reached = next((played[step] for step in sorted(evals) if evals[step] >= REACHED), "not reached")
    shown = [f"{evals[step]:.2f}" for step in (0, 4, 8)]
    divergence = f"{kl[0]:.2f} → {kl[-1]:.2f}" if kl else ""
    return [name, seed, played[1], *shown, reached, f"{evals[max(evals)]:.2f}", divergence]
