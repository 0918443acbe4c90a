"""Every algorithm on `reverse`, one run: a job for each on one pool, with the recipe of examples/quickstart.yaml. Held-out tasks before and after, T = 1.

Draws docs/algorithms.png: reward in training, smoothed over three steps, and the evaluations as dots.
"""

import copy
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from bench.runs import Run, documents, run, table
from marlaas.plots import style
from marlaas_worker.rl.algorithms import Algorithm

PICTURE = Path(__file__).parent.parent / "docs" / "algorithms.png"
NAMES: tuple[Algorithm, ...] = get_args(Algorithm)
STEPS = 28
RECIPES: dict[str, dict[str, Any]] = {}
"""What differs from the quickstart's `training`."""


def manifests() -> list[dict[str, Any]]:
    """One pool, and a job in a namespace of its own for each algorithm."""
    pool, *_, first, _ = documents("quickstart.yaml")
    pool["spec"]["adapterSlots"] = 3 * len(NAMES)
    return [pool, *(_job(first, name) for name in NAMES)]


def main() -> None:
    result = run(manifests())
    rows = [_row(name, result) for name in NAMES]
    print(table(["algorithm", "before", "after", "steps", "clip %", "mean gap", "grad norm", "phase"], rows))
    print(f"\n{len(NAMES)} jobs on one pool: {result.wall_s:.0f} s in all")
    draw(result, PICTURE)


def draw(result: Run, path: Path) -> None:
    """One small picture per algorithm, the others in grey behind it."""
    figure = style.blank(10, 4.6)
    panels = figure.subplots(2, 4, sharex=True, sharey=True).flatten()
    curves = {name: _smooth([record["reward_mean"] for record in _steps(result, name)]) for name in NAMES}
    for panel, name, colour in zip(panels, NAMES, style.RUNS * 2, strict=False):
        for curve in curves.values():
            panel.plot(range(1, len(curve) + 1), curve, color="#d9d9d9", linewidth=0.8)
        panel.plot(range(1, len(curves[name]) + 1), curves[name], color=colour, linewidth=2)
        before, after = _evals(result, name)
        panel.plot([0, len(curves[name])], [before, after], "o", color=colour, markersize=5)
        panel.set_title(f"{name}  {before:.2f} → {after:.2f}", loc="left", fontsize=10, color=style.INK)
        panel.set_ylim(0, 1.05)
        style.plain(panel)
    for panel in panels[len(NAMES) :]:
        panel.axis("off")
    figure.savefig(path, format="png", dpi=80)


def _job(first: dict[str, Any], name: str) -> dict[str, Any]:
    job = copy.deepcopy(first)
    label = name.replace("+", "p")
    job["metadata"] = {"name": label, "namespace": label}
    job["spec"]["training"] |= {"algorithm": name, "steps": STEPS} | RECIPES.get(name, {})
    return job


def _key(name: str) -> str:
    return "/".join([name.replace("+", "p")] * 2)


def _steps(result: Run, name: str) -> list[dict[str, Any]]:
    return result.records[_key(name)]


def _evals(result: Run, name: str) -> tuple[float, float]:
    job = result.jobs()[_key(name)]
    return job["evalBefore"], job["evalAfter"]


def _row(name: str, result: Run) -> list[Any]:
    metrics = [record["metrics"] for record in _steps(result, name) if record["metrics"]]
    mean = {key: fmean(each[key] for each in metrics) for key in ("clip_fraction", "logprob_gap", "grad_norm")}
    before, after = _evals(result, name)
    figures = [f"{100 * mean['clip_fraction']:.1f}", f"{mean['logprob_gap']:.3f}", f"{mean['grad_norm']:.2f}"]
    return [
        name,
        f"{before:.3f}",
        f"{after:.3f}",
        len(_steps(result, name)),
        *figures,
        result.jobs()[_key(name)]["phase"],
    ]


def _smooth(values: list[float]) -> list[float]:
    return [fmean(values[max(0, at - 1) : at + 2]) for at in range(len(values))]


if __name__ == "__main__":
    main()
