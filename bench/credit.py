"""`training.credit`: the episode's reward, discounted returns of turns, and equal states, on `guess-number` with a reward for each possible guess.

The tiny model guesses one of six numbers. Strict jobs of one run side by side, one for each setting; a job's results do not depend on its neighbours. All
have the same rewards, and the row `no turn rewards` has those of the episode only. Prints held-out means: the share of numbers that were found, and the
guesses of an episode.
"""

from collections.abc import Sequence
from typing import Any

from bench import options
from bench.runs import documents, print_table, strict_jobs
from bench.sources import ROOT

KEPT = ROOT / "runs" / "credit"
TURN_REWARD = 0.1
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"type": "episode"},
    "episode": {"type": "episode"},
    "turn": {"type": "turn", "discount": 0.9},
    "state": {"type": "state", "discount": 0.9},
}
HEADERS = ["credit", "seed", "found, before", "at half", "at the end", "guesses, before", "at half", "at the end"]


def manifests(steps: int) -> list[dict[str, Any]]:
    """Return the pool and a job for each setting."""
    pool, *_ = documents("quickstart.yaml")
    pool["spec"]["adapterSlots"] = 3 * len(SETTINGS)
    return [pool, *(_job(name, steps) for name in SETTINGS)]


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("credit", __doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20, help="default: 20")
    chosen = parser.parse_args(arguments)
    found = {seed: strict_jobs(KEPT / f"{seed}.json", manifests(chosen.steps), seed) for seed in chosen.seeds}
    print_table(HEADERS, [_row(name, seed, jobs) for name in SETTINGS for seed, jobs in found.items()])


def _job(name: str, steps: int) -> dict[str, Any]:
    args = {"low": 1, "high": 9, "width": 6, "max_guesses": 6, "turn_reward": 0.0 if name == "none" else TURN_REWARD}
    training = {"algorithm": "grpo", "groupsPerStep": 8, "optimizer": {"learningRate": 2e-3}}
    spec = {
        "poolRef": {"name": "tiny"},
        "agents": [{"name": "policy", "adapter": {"rank": 8, "alpha": 16}}],
        "environment": {"name": "guess-number", "args": args},
        "rollout": {"groupSize": 8, "maxTurns": 6, "maxTokens": 3},
        "training": training | {"credit": SETTINGS[name], "maxStaleness": 0, "steps": steps},
        "evaluation": {"every": steps // 2, "tasks": 64},
    }
    names = {"name": f"credit-{name}", "namespace": f"team-{name}"}
    return {"apiVersion": "marlaas.dev/v1alpha1", "kind": "RLJob", "metadata": names, "spec": spec}


def _row(name: str, seed: int, jobs: dict[str, Any]) -> list[object]:
    metrics = [one["metrics"] for one in jobs[f"team-{name}/credit-{name}"]["evals"]]
    means = [
        [f"{one[wanted]:.2f}" for one in (metrics[0], metrics[len(metrics) // 2], metrics[-1])]
        for wanted in ("found", "guesses")
    ]
    return ["no turn rewards" if name == "none" else name, seed, *means[0], *means[1]]
