"""`training.updatesPerStep` and `epochs`: steps until the held-out reward of `reverse` is 0.9, with 1, 2 and 4 updates a step.

Strict jobs of one run side by side, one for each setting; a job's results do not depend on its neighbours. A row with one update at twice the
learning rate shows what only larger steps would bring.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from bench import options
from bench.runs import documents, print_table, strict_jobs
from bench.sources import ROOT

KEPT = ROOT / "runs" / "updates"
REACHED = 0.9
EVERY = 2
RATE = 2e-3
HEADERS = ["updatesPerStep", "epochs", "learning rate", "seed", "steps to 0.9", "at the end", "clipped", "update_kl"]


class Setting(NamedTuple):
    """Updates a step from disjoint minibatches, epochs, and the learning rate's factor."""

    updates: int
    epochs: int = 1
    factor: float = 1.0

    @property
    def job(self) -> str:
        """Name of the setting's job."""
        return f"u{self.updates}-e{self.epochs}-r{self.factor:g}"


SETTINGS = (Setting(1), Setting(2), Setting(4), Setting(1, 2), Setting(2, 2), Setting(1, 1, 2))


def manifests(steps: int) -> list[dict[str, Any]]:
    """Return the pool and a job for each setting."""
    pool, *_, job, _ = documents("quickstart.yaml")
    pool["spec"]["adapterSlots"] = 3 * len(SETTINGS)
    return [pool, *(_job(job, setting, steps) for setting in SETTINGS)]


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("updates", __doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=28, help="default: 28")
    chosen = parser.parse_args(arguments)
    found = {seed: strict_jobs(KEPT / f"{seed}.json", manifests(chosen.steps), seed) for seed in chosen.seeds}
    print_table(HEADERS, [_row(setting, seed, jobs) for setting in SETTINGS for seed, jobs in found.items()])


def _job(job: dict[str, Any], setting: Setting, steps: int) -> dict[str, Any]:
    training = job["spec"]["training"] | {
        "updatesPerStep": setting.updates,
        "epochs": setting.epochs,
        "optimizer": {"learningRate": RATE * setting.factor},
        "maxStaleness": 0,
        "steps": steps,
    }
    spec = job["spec"] | {"training": training, "evaluation": {"every": EVERY, "tasks": 64}}
    return job | {"metadata": {"name": setting.job, "namespace": f"team-{setting.job}"}, "spec": spec}


def _row(setting: Setting, seed: int, jobs: dict[str, Any]) -> list[object]:
    job = jobs[f"team-{setting.job}/{setting.job}"]
    reached = next((one["version"] for one in job["evals"] if one["reward_mean"] >= REACHED), None)
    metrics = [step["metrics"] for step in job["steps"] if step["metrics"]]
    moved = [one["update_kl"] for one in metrics if "update_kl" in one]
    return [
        setting.updates,
        setting.epochs,
        f"{RATE * setting.factor:g}",
        seed,
        "not reached" if reached is None else reached,
        f"{job['evals'][-1]['reward_mean']:.2f}",
        f"{fmean(one.get('clip_fraction', 0.0) for one in metrics):.1%}",
        f"{fmean(moved):.4f}" if moved else "",
    ]
