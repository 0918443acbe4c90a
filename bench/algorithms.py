"""Every algorithm on `reverse`, one run: a job for each on one pool, with the recipe of examples/quickstart.yaml. Held-out tasks before and after, T = 1.

Draws docs/algorithms.png: reward in training, smoothed over three steps, and the evaluations as dots.
"""

import copy
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.runs import Run, documents, run, table
from marlaas.plots import style

PICTURE = Path(__file__).parent.parent / "docs" / "algorithms.png"
STEPS = 28
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": "grpo"},
    "dr-grpo": {"algorithm": "dr-grpo"},
    "dapo": {"algorithm": "dapo"},
    "gspo": {"algorithm": "gspo", "clip": {"low": 0.1, "high": 0.15}},
    "rloo": {"algorithm": "rloo"},
    "reinforce++": {"algorithm": "reinforce++"},
    "cispo": {"algorithm": "cispo"},
    "gspo, paper's clip": {"algorithm": "gspo"},
}
"""What differs from the quickstart's `training`. gspo's bounds are for a LoRA's learning rate: see docs/algorithms.md."""
HEADERS = ["algorithm", "before", "after", "steps", "clip %", "mean gap", "grad norm", "phase"]


def manifests() -> list[dict[str, Any]]:
    """One pool, and a job in a namespace of its own for each recipe."""
    pool, *_, first, _ = documents("quickstart.yaml")
    pool["spec"]["adapterSlots"] = 3 * len(RECIPES)
    return [pool, *(_job(first, number) for number in range(len(RECIPES)))]


def main() -> None:
    result = run(manifests())
    print(table(HEADERS, [_row(number, result) for number in range(len(RECIPES))]))
    print(f"\n{len(RECIPES)} jobs on one pool: {result.wall_s:.0f} s in all")
    draw(result, PICTURE)


def draw(result: Run, path: Path) -> None:
    """One small picture per recipe, the others in grey behind it."""
    figure = style.blank(10, 4.6)
    panels = figure.subplots(2, 4, sharex=True, sharey=True).flatten()
    curves = [_smooth([record["reward_mean"] for record in _steps(result, number)]) for number in range(len(RECIPES))]
    for number, (panel, name) in enumerate(zip(panels, RECIPES, strict=True)):
        colour, _ = style.of_run(number)
        for curve in curves:
            panel.plot(range(1, len(curve) + 1), curve, color=style.RULE, linewidth=0.6)
        panel.plot(range(1, len(curves[number]) + 1), curves[number], color=colour, linewidth=2)
        before, after = _evals(result, number)
        panel.plot([0, len(curves[number])], [before, after], "o", color=colour, markersize=5)
        panel.set_title(f"{name}  {before:.2f} → {after:.2f}", loc="left", fontsize=10, color=style.INK)
        panel.set_ylim(0, 1.05)
        style.plain(panel)
    figure.supxlabel("step", fontsize=9, color=style.INK)
    figure.supylabel("reward", fontsize=9, color=style.INK)
    figure.savefig(path, format="png", dpi=80)


def _job(first: dict[str, Any], number: int) -> dict[str, Any]:
    job = copy.deepcopy(first)
    recipe = list(RECIPES.values())[number]
    job["metadata"] = {"name": f"recipe-{number}", "namespace": f"team-{number}"}
    job["spec"]["training"] |= {"steps": STEPS} | recipe
    return job


def _key(number: int) -> str:
    return f"team-{number}/recipe-{number}"


def _steps(result: Run, number: int) -> list[dict[str, Any]]:
    return result.records[_key(number)]


def _evals(result: Run, number: int) -> tuple[float, float]:
    job = result.jobs()[_key(number)]
    return job["evalBefore"], job["evalAfter"]


def _row(number: int, result: Run) -> list[Any]:
    metrics = [record["metrics"] for record in _steps(result, number) if record["metrics"]]
    mean = {key: fmean(each[key] for each in metrics) for key in ("clip_fraction", "logprob_gap", "grad_norm")}
    before, after = _evals(result, number)
    figures = [f"{100 * mean['clip_fraction']:.1f}", f"{mean['logprob_gap']:.3f}", f"{mean['grad_norm']:.2f}"]
    told = [f"{before:.3f}", f"{after:.3f}", len(_steps(result, number)), *figures]
    return [list(RECIPES)[number], *told, result.jobs()[_key(number)]["phase"]]


def _smooth(values: list[float]) -> list[float]:
    return [fmean(values[max(0, at - 1) : at + 2]) for at in range(len(values))]
