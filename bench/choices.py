"""Groups of candidates against groups of episodes, at the same number of replies: `python -m bench agents --only branch`.

One policy, builtin model tiny, strict, the task of `choice_env`: a word, a decision, an answer. A group samples 24 replies.

- episodes: 8 episodes, which are compared by their rewards.
- decision: 4 episodes. The decision has 4 candidates with rewards of their own, which are compared with each other.
- turns: 2 episodes, in which each of the three turns has 4 candidates (agent- and turn-wise groups).

Held-out tasks are played without candidates, every third step.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.choice_env import ANSWER, DECISION, WORD
from bench.runs import changed, finished, kept, run, table
from bench.sources import ROOT, python_path
from marlaas.plots.style import INK, blank, of_run, plain

EVERY, GROUPS, STEPS, GOAL, CANDIDATES = 3, 8, 45, 0.8, 4
VARIANTS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "episodes": (8, ()),
    "decision": (4, (DECISION,)),
    "turns": (2, (WORD, DECISION, ANSWER)),
}
"""Episodes of a group, and the turns with candidates."""
HEADERS = [
    "groups",
    "seed",
    "tokens per step",
    "before",
    "after",
    f"first step at {GOAL}",
    f"decision: first step at {GOAL}",
]


def measure(seeds: Sequence[int], steps: int | None, rate: float | None, folder: Path, picture: Path) -> None:
    """Train each variant with each seed, print the table and draw the picture. None: see `variant`."""
    found = {(name, seed): train(name, seed, folder, steps, rate) for seed in seeds for name in VARIANTS}
    print("\n" + table(HEADERS, [row(name, seed, found[name, seed]) for name in VARIANTS for seed in seeds]) + "\n")
    draw(found, picture)


def variant(name: str, steps: int | None = None, rate: float | None = None) -> list[dict[str, Any]]:
    """Return the pool and the job. None: `STEPS`, and the rate of examples/agents/relay.yaml, whose pool it has."""
    pool, job = copy.deepcopy(changed("agents/relay.yaml", steps or STEPS, rate))
    group_size, branched = VARIANTS[name]
    job["metadata"]["name"] = name
    job["spec"] |= {
        "agents": [{"name": "policy", "adapter": {"rank": 8, "alpha": 16}}],
        "environment": {"name": "choice_env:play", "args": {"candidates": CANDIDATES, "branched": list(branched)}},
        "rollout": {"groupSize": group_size, "maxTurns": 3, "maxTokens": 16},
        "evaluation": {"every": EVERY, "tasks": 64},
    }
    job["spec"]["training"] |= {"groupsPerStep": GROUPS, "maxStaleness": 0}
    return [pool, job]


def train(name: str, seed: int, folder: Path, steps: int | None, rate: float | None) -> dict[str, Any]:
    """Return a run's generated tokens per step, and its evaluations: rows of step, reward, and share of right decisions."""
    wanted = variant(name, steps, rate)

    def new() -> dict[str, Any]:
        result = finished(run(wanted, seed=seed, env={"PYTHONPATH": python_path(ROOT, ROOT / "bench")}))
        (job,) = result.jobs()
        tokens = [one["usage"]["policy"]["generated_tokens"] for one in result.records[job]]
        return {
            "tokens": sum(tokens) / len(tokens),
            "evals": [[one["step"], one["reward_mean"], one["metrics"]["called"]] for one in result.evals[job]],
        }

    return kept(folder / f"choices-{name}-{seed}.json", wanted, new)


def first_at(goal: float, evals: Sequence[Sequence[float]], column: int = 1) -> int | None:
    """Return the first step whose evaluation is at least the goal; None if none is. evals: rows of step and values."""
    return next((int(one[0]) for one in evals if one[column] >= goal), None)


def row(name: str, seed: int, found: Mapping[str, Any]) -> list[Any]:
    """Return a row of the table."""
    evals = found["evals"]
    steps = [first_at(GOAL, evals, column) for column in (1, 2)]
    ends = [f"{evals[at][1]:.3f}" for at in (0, -1)]
    return [name, seed, f"{found['tokens']:.0f}", *ends, *("never" if step is None else step for step in steps)]


def draw(found: Mapping[tuple[str, int], Mapping[str, Any]], path: Path) -> None:
    """Draw the mean of the evaluations over the seeds: the reward, and the decision."""
    figure = blank(6.8, 2.8)
    for axes, (column, title) in zip(
        figure.subplots(1, 2, sharey=True), ((1, "reward"), (2, "right decisions")), strict=True
    ):
        for number, name in enumerate(VARIANTS):
            colour, _ = of_run(number)
            curves = [one["evals"] for (other, _), one in found.items() if other == name]
            steps = [rows[0][0] for rows in zip(*curves, strict=True)]
            means = [sum(one[column] for one in rows) / len(rows) for rows in zip(*curves, strict=True)]
            axes.plot(steps, means, color=colour, linewidth=1.5, label=name)
        axes.set_ylim(0, 1.05)
        axes.set_title(title, fontsize=10, color=INK)
        axes.set_xlabel("step", fontsize=9, color=INK)
        plain(axes)
    axes.legend(title="groups of", frameon=False, loc="lower right")
    figure.savefig(path, format="png", dpi=100)
