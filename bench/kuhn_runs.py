"""Runs of examples/agents/kuhn-poker.yaml: what is kept of each, its row of the table, and the curves of NashConv."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.kuhn import Policy, average, nash_conv, value
from bench.runs import finished, kept, run
from marlaas.envs.kuhn_poker import PLAYERS
from marlaas.plots.style import INK, RULE, blank, of_run, plain

EXAMPLE = "agents/kuhn-poker.yaml"
MUST, AIM = 0.30, 0.20
HEADERS = [
    "seed",
    "steps",
    "start",
    "last versions",
    "average",
    "value for `first`",
    "seconds",
    f"average ≤ {MUST:.2f}",
]
Policies = Mapping[str, list[dict[str, float]]]
"""By agent: its policy before training and after each step."""


def train(manifests: list[dict[str, Any]], seed: int, folder: Path) -> dict[str, Any]:
    """Return the policies and the duration of a run of the example."""

    def new() -> dict[str, Any]:
        from bench.kuhn_policies import policies_of  # it imports torch, which the other measurements need not wait for

        result = finished(run(manifests, seed=seed))
        policies = policies_of(result, manifests[0]["spec"]["model"]["builtin"])
        return {"seconds": result.wall_s, "policies": policies}

    return kept(folder / f"kuhn-{seed}.json", manifests, new)


def at(policies: Policies, step: int) -> Policy:
    """Return both agents' policies after a step."""
    return {known: bet for agent in PLAYERS for known, bet in policies[agent][step].items()}


def average_at(policies: Policies, step: int) -> Policy:
    """Return the reach-weighted average of both agents' policies over the last half of the steps up to this one."""
    since = step // 2 + 1 if step else 0
    return {known: bet for agent in PLAYERS for known, bet in average(policies[agent][since : step + 1]).items()}


def row(seed: int, found: dict[str, Any]) -> list[Any]:
    policies: Policies = found["policies"]
    steps = len(policies["first"]) - 1
    mean = average_at(policies, steps)
    end = nash_conv(mean)
    numbers = [nash_conv(at(policies, 0)), nash_conv(at(policies, steps)), end, value(mean)]
    told = "missed" if end > MUST else "met" if end > AIM else f"met, also {AIM:.2f}"
    return [seed, steps, *(f"{number:.3f}" for number in numbers), f"{found['seconds']:.0f}", told]


def draw(trained: dict[int, dict[str, Any]], path: Path) -> None:
    """Draw NashConv by step for each seed: a thin line for the versions, a thick one for the average over their last half."""
    figure = blank(6.4, 3.2)
    axes = figure.subplots()
    for number, (seed, found) in enumerate(trained.items()):
        colour, _ = of_run(number)
        policies: Policies = found["policies"]
        steps = range(len(policies["first"]))
        axes.plot(steps, [nash_conv(at(policies, step)) for step in steps], color=colour, linewidth=0.7, alpha=0.5)
        mean = [nash_conv(average_at(policies, step)) for step in steps]
        axes.plot(steps, mean, color=colour, linewidth=2, label=str(seed))
    axes.axhline(MUST, color=RULE, linestyle="--", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.set_ylabel("NashConv, chips", fontsize=9, color=INK)
    axes.legend(title="seed", frameon=False, loc="upper right")
    plain(axes)
    figure.savefig(path, format="png", dpi=100)
