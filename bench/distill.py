"""`distill`: words of five letters of `reverse`, which the untrained tiny model hardly ever spells backwards, by RL and from a teacher.

Two strict runs for each seed: the teacher's, by RL on words of three to five letters, then a student of it (examples/distill) beside RL, both on
words of five letters. A step of each has 64 episodes, without those that replace groups without signal in RL.
"""

from collections.abc import Sequence
from typing import Any

from bench import options
from bench.runs import documents, print_table, strict_jobs
from bench.sources import ROOT

KEPT = ROOT / "runs" / "distill"
REACHED = 0.8
STEPS = 12, 10
LETTERS = {"min_length": 5, "max_length": 5}
"""Of the teacher, and of the jobs beside each other."""
HEADERS = [
    "job",
    "seed",
    "before",
    "after 2 steps",
    "after 4",
    "after 6",
    "episodes to 0.8",
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
    """Return the pools, the student of the adapter, and RL, on words of five letters."""
    small, large, job = documents("distill/student.yaml")
    job["spec"]["agents"][-1]["initFrom"] = adapter
    _, alone = documents("distill/teacher.yaml")
    alone["metadata"] = {"name": "rl", "namespace": "team-b"}
    environment = {"name": "reverse", "args": LETTERS}
    return [small, large, *(_strict(one, STEPS[1], environment=environment) for one in (job, alone))]


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
    shown = [f"{evals[step]:.2f}" for step in (0, 2, 4, 6)]
    divergence = f"{kl[0]:.2f} → {kl[-1]:.2f}" if kl else ""
    return [name, seed, *shown, reached, f"{evals[max(evals)]:.2f}", divergence]
