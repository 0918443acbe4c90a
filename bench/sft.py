"""`initFrom.sft`: steps of RL until the held-out reward of `reverse` is 0.9, after 200 demonstrations and without them.

Strict jobs of one run side by side, one for each setting; a job's results do not depend on its neighbours.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from bench import options
from bench.runs import EXAMPLES, documents, print_table, strict_jobs
from bench.sources import ROOT

KEPT = ROOT / "runs" / "sft"
REACHED = 0.9
EVERY = 2
RATE = 2e-3
ROWS_PER_STEP = 20
HEADERS = ["demonstrations", "learning rate", "seed", "before", "after them", "steps of RL to 0.9", "at the end"]


class Setting(NamedTuple):
    """Steps of demonstrations, their learning rate, and steps of RL after them."""

    steps: int
    rate: float
    rl: int

    @property
    def job(self) -> str:
        """Name of the setting's job."""
        return f"s{self.steps}-r{round(1e4 * self.rate)}"


SETTINGS = (Setting(0, RATE, 12), Setting(10, RATE, 6), Setting(10, RATE / 4, 6))


def manifests() -> list[dict[str, Any]]:
    """Return the pool and a job for each setting."""
    pool, *_, job, _ = documents("quickstart.yaml")
    pool["spec"]["adapterSlots"] = 3 * len(SETTINGS)
    return [pool, *(_job(job, setting) for setting in SETTINGS)]


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("sft", __doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    chosen = parser.parse_args(arguments)
    found = {seed: strict_jobs(KEPT / f"{seed}.json", manifests(), seed) for seed in chosen.seeds}
    print_table(HEADERS, [_row(setting, seed, jobs) for setting in SETTINGS for seed, jobs in found.items()])


def _job(job: dict[str, Any], setting: Setting) -> dict[str, Any]:
    (agent,) = job["spec"]["agents"]
    steps = setting.steps + setting.rl
    training = job["spec"]["training"] | {"maxStaleness": 0, "steps": steps, "optimizer": {"learningRate": RATE}}
    spec = job["spec"] | {"training": training, "evaluation": {"every": EVERY, "tasks": 64}}
    if setting.steps:
        data = {
            "source": {"files": str(EXAMPLES / "reversals.jsonl")},
            "prompt": [{"role": "user", "content": "reverse: {{ word }}"}],
            "completion": "{{ reversed }}",
        }
        sft = {"data": data, "steps": setting.steps, "rowsPerStep": ROWS_PER_STEP, "learningRate": setting.rate}
        spec["agents"] = [agent | {"initFrom": {"sft": sft}}]
    return job | {"metadata": {"name": setting.job, "namespace": f"team-{setting.job}"}, "spec": spec}


def _row(setting: Setting, seed: int, jobs: dict[str, Any]) -> list[object]:
    evals = {one["step"]: one["reward_mean"] for one in jobs[f"team-{setting.job}/{setting.job}"]["evals"]}
    reached = next((step for step in sorted(evals) if step >= setting.steps and evals[step] >= REACHED), None)
    return [
        setting.steps * ROWS_PER_STEP,
        f"{setting.rate:g}" if setting.steps else "",
        seed,
        f"{evals[0]:.2f}",
        f"{evals[setting.steps]:.2f}" if setting.steps else "",
        "not reached" if reached is None else reached - setting.steps,
        f"{evals[max(evals)]:.2f}",
    ]
