"""examples/agents/solver-verifier.yaml with two seeds: `marlaas run`, and the held-out tasks before, during and after training.

`solved` is the solver's accuracy. `judged` is the verifier's on fixed drafts. Half of them are right, so it is the balanced
accuracy; a reply that begins with neither word counts as wrong. When all seeds are complete, draws docs/images/solver-verifier.png.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.runs import documents, finished, kept, run, table
from bench.sources import ROOT
from marlaas.plots.style import INK, blank, of_run, plain

PICTURE = ROOT / "docs" / "images" / "solver-verifier.png"
AGENTS = {"solver": "solved", "verifier": "judged"}
"""The agents and their metrics."""
GAIN = {"solver": 0.25, "verifier": 0.15}
AIM = {"solver": 0.9, "verifier": 0.75}
HEADERS = ["seed", "steps", *(f"{one} {when}" for one in AGENTS.values() for when in ("before", "after")), "seconds"]
HEADERS += [f"{agent} ≥ +{GAIN[agent]}, aim {AIM[agent]}" for agent in AGENTS]


def measure(seeds: Sequence[int], steps: int | None, folder: Path, picture: Path = PICTURE) -> None:
    """Train the example with each seed, print the table and draw the picture. steps: None for the example's."""
    manifests = documents("agents/solver-verifier.yaml")
    training = manifests[1]["spec"]["training"]
    training["steps"] = steps or training["steps"]
    found = {seed: train(manifests, seed, folder) for seed in seeds}
    print("\n" + table(HEADERS, [row(seed, one) for seed, one in found.items()]) + "\n")
    draw(found, picture)


def train(manifests: list[dict[str, Any]], seed: int, folder: Path) -> dict[str, Any]:
    """Return the results of a run: evaluations by step, and mean rewards of each step by agent."""

    def new() -> dict[str, Any]:
        result = finished(run(manifests, seed=seed))
        (name,) = result.jobs()
        records, evals = result.records[name], result.evals[name]
        return {
            "steps": len(records),
            "seconds": result.wall_s,
            "evals": {
                agent: [[one["step"], one["metrics"][metric]] for one in evals] for agent, metric in AGENTS.items()
            },
            "verdicts": [[one["step"], one["metrics"]["verdicts"]] for one in evals],
            "rewards": {agent: [one["agents"][agent]["reward_mean"] for one in records] for agent in AGENTS},
        }

    return kept(folder / f"verifier-{seed}.json", manifests, new)


def row(seed: int, found: dict[str, Any]) -> list[Any]:
    """Return a row of the table: each agent's first and last evaluation, and whether its target is met."""
    ends = {agent: (found["evals"][agent][0][1], found["evals"][agent][-1][1]) for agent in AGENTS}
    numbers = [f"{number:.3f}" for pair in ends.values() for number in pair]
    return [seed, found["steps"], *numbers, f"{found['seconds']:.0f}", *(told(agent, *ends[agent]) for agent in AGENTS)]


def told(agent: str, before: float, after: float) -> str:
    """Return whether an agent met its target, and its aim."""
    if after - before < GAIN[agent]:
        return "missed"
    return f"met, also {AIM[agent]}" if after >= AIM[agent] else "met"


def draw(found: dict[int, dict[str, Any]], path: Path) -> None:
    """Draw a panel for each agent, with a line of training rewards for each seed and a dot for each evaluation."""
    figure = blank(6.8, 2.8)
    for axes, agent in zip(figure.subplots(1, len(AGENTS), sharey=True), AGENTS, strict=True):
        for number, (seed, one) in enumerate(found.items()):
            colour, _ = of_run(number)
            rewards = one["rewards"][agent]
            axes.plot(range(1, len(rewards) + 1), rewards, color=colour, linewidth=1.2, alpha=0.6, label=str(seed))
            axes.plot(*zip(*one["evals"][agent], strict=True), "o", color=colour, markersize=5)
        axes.set_ylim(0, 1.05)
        axes.set_title(agent, fontsize=10, color=INK)
        axes.set_xlabel("step", fontsize=9, color=INK)
        plain(axes)
    axes.legend(title="seed", frameon=False, loc="lower right")
    figure.savefig(path, format="png", dpi=100)
