"""Every algorithm that learns from rewards, on `reverse`: both forms of the ratio, maxStaleness 0 and 1, three seeds; the recipe of examples/quickstart.yaml, T = 1.

One `marlaas run` for each form, staleness and seed, with one job per algorithm side by side: a job's results do not
depend on its neighbours. Each run's results are kept under --out, and a run whose results exist is not
repeated with the same sources.
Prints held-out evaluations over the seeds, and draws docs/images/algorithms.png when all runs are complete: reward in
training at staleness 1, smoothed over three steps.
"""

import argparse
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from bench import options
from bench.runs import Run, documents, kept, run, table
from bench.sources import ROOT
from marlaas.plots.style import INK, blank, of_run, plain
from marlaas_worker.rl.algorithms import ALGORITHMS, Ratio

REWARDED = tuple(name for name, rule in ALGORITHMS.items() if rule.advantage not in ("none", "teacher"))
"""The algorithms that learn from rewards."""
PICTURE = ROOT / "docs" / "images" / "algorithms.png"
KEPT = ROOT / "runs" / "algorithms"
METRICS = ("clip_fraction", "truncated_fraction", "logprob_gap", "ess", "grad_norm", "entropy")
HEADERS = ["algorithm", "ratio", "maxStaleness", "before", "after, mean", "after, min", "clip %", "truncated %"]
HEADERS += ["mean gap", "ess", "grad norm", "entropy at the end"]


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Settings that the jobs of one run share."""

    form: Ratio
    staleness: int
    seed: int

    def __str__(self) -> str:
        return f"{self.form}-{self.staleness}-{self.seed}"

    @property
    def algorithms(self) -> list[str]:
        """Algorithms that the staleness allows."""
        return [name for name in REWARDED if self.staleness or ALGORITHMS[name].over == "group"]


def manifests(setting: Setting, steps: int) -> list[dict[str, Any]]:
    """Return one pool, and for each algorithm a job in its own namespace, with the bounds of its paper."""
    pool, *_, first, _ = documents("quickstart.yaml")
    pool["spec"]["adapterSlots"] = 3 * len(setting.algorithms)
    return [pool, *(_job(first, name, setting, steps) for name in setting.algorithms)]


def measure(setting: Setting, steps: int, folder: Path) -> dict[str, Any]:
    """Return the results of a run's jobs by algorithm: stored ones, or those of a new run."""
    wanted = manifests(setting, steps)

    def new() -> dict[str, Any]:
        result = run(wanted, seed=setting.seed)
        jobs = {name: _figures(result, name) for name in setting.algorithms}
        evals = ", ".join(f"{name} {one['after']:.3f}" for name, one in jobs.items())
        print(f"{setting}: {evals}; {result.wall_s:.0f} s", flush=True)
        return {"wall_s": result.wall_s, "jobs": jobs}

    return dict(kept(folder / f"{setting}.json", wanted, new)["jobs"])


def main(arguments: Sequence[str] = ()) -> None:
    chosen = _parser().parse_args(arguments)
    settings = [Setting(*each) for each in itertools.product(chosen.forms, chosen.staleness, chosen.seeds)]
    found = {setting: measure(setting, chosen.steps, chosen.out) for setting in settings}
    rows = [
        _row(name, form, staleness, [jobs[name] for setting, jobs in found.items() if _is(setting, form, staleness)])
        for name in REWARDED
        for form, staleness in itertools.product(chosen.forms, chosen.staleness)
        if name in Setting(form, staleness, 0).algorithms
    ]
    print(f"\n{table(HEADERS, rows)}\n\nseeds {', '.join(map(str, chosen.seeds))}; {chosen.steps} steps")
    if 1 in chosen.staleness and set(chosen.forms) == set(get_args(Ratio)):
        draw(found, PICTURE)


def draw(found: dict[Setting, dict[str, Any]], path: Path) -> None:
    """Draw one small plot per algorithm, with a line for each form: mean of the seeds, at staleness 1."""
    figure = blank(10, 4.6)
    panels = figure.subplots(2, 4, sharex=True, sharey=True).flatten()
    for panel, name in zip(panels, REWARDED, strict=False):
        for number, form in enumerate(get_args(Ratio)):
            jobs = [jobs[name] for setting, jobs in found.items() if _is(setting, form, 1)]
            curve = [fmean(rewards) for rewards in zip(*(_smooth(job["rewards"]) for job in jobs), strict=False)]
            colour, _ = of_run(number)
            panel.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=2, label=form)
            panel.plot([len(curve)], [fmean(job["after"] for job in jobs)], "o", color=colour, markersize=5)
        panel.set_title(name, loc="left", fontsize=10, color=INK)
        panel.set_ylim(0, 1.05)
        plain(panel)
    panels[-1].set_axis_off()
    panels[-1].legend(*panels[0].get_legend_handles_labels(), loc="center", frameon=False, title="ratio")
    figure.supxlabel("step", fontsize=9, color=INK)
    figure.supylabel("reward", fontsize=9, color=INK)
    figure.savefig(path, format="png", dpi=80)


def _parser() -> argparse.ArgumentParser:
    parser = options("algorithms", __doc__)
    parser.add_argument("--forms", nargs="+", choices=get_args(Ratio), default=list(get_args(Ratio)))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--out", type=Path, default=KEPT, help="folder for the results of runs; default: %(default)s")
    return parser


def _job(first: dict[str, Any], name: str, setting: Setting, steps: int) -> dict[str, Any]:
    job = copy.deepcopy(first)
    namespace, metadata_name = _key(name).split("/")
    job["metadata"] = {"name": metadata_name, "namespace": namespace}
    own = {"algorithm": name, "ratio": setting.form, "maxStaleness": setting.staleness, "steps": steps}
    job["spec"]["training"] |= own
    return job


def _key(name: str) -> str:
    label = name.replace("+", "p")
    return f"team-{label}/{label}"


def _figures(result: Run, name: str) -> dict[str, Any]:
    job, records = result.jobs()[_key(name)], result.records[_key(name)]
    metrics = [record["metrics"] for record in records if record["metrics"]]
    means = {key: fmean(each[key] for each in metrics) for key in METRICS}
    ends = {"before": job["evalBefore"], "after": job["evalAfter"], "phase": job["phase"]}
    return ends | means | {"last_entropy": metrics[-1]["entropy"], "rewards": [one["reward_mean"] for one in records]}


def _is(setting: Setting, form: str, staleness: int) -> bool:
    return (setting.form, setting.staleness) == (form, staleness)


def _row(name: str, form: str, staleness: int, jobs: list[dict[str, Any]]) -> list[Any]:
    mean = {key: fmean(job[key] for job in jobs) for key in ("before", "after", "last_entropy", *METRICS)}
    ends = [f"{mean['before']:.3f}", f"{mean['after']:.3f}", f"{min(job['after'] for job in jobs):.3f}"]
    shares = [f"{100 * mean[key]:.1f}" for key in ("clip_fraction", "truncated_fraction")]
    rest = [
        f"{mean['logprob_gap']:.3f}",
        f"{mean['ess']:.3f}",
        f"{mean['grad_norm']:.2f}",
        f"{mean['last_entropy']:.2f}",
    ]
    return [f"`{name}`", form, staleness, *ends, *shares, *rest]


def _smooth(values: list[float]) -> list[float]:
    return [fmean(values[max(0, at - 1) : at + 2]) for at in range(len(values))]
