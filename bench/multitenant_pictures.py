"""Pictures of `bench multitenant`: rates by mode, who is at work in A and D, and shares of tenants over time."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.multitenant_report import Outlines
from bench.multitenant_workload import Mode, Workload, name_of
from marlaas.episodes.files import read
from marlaas.local.records import read_line
from marlaas.plots.occupancy import LANES, busy_share, num_busy, on_common_time
from marlaas.plots.series import Timeline, timeline
from marlaas.plots.shares import service, shares
from marlaas.plots.style import INK, LANE_COLOURS, blank, of_run, plain
from marlaas.plots.tenants import draw_shares, shares_height
from marlaas_api.messages import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WINDOWS = 120


def draw_rates(found: Mapping[Workload, Outlines], path: Path) -> None:
    """Draw bars of steps/s: a panel for each waiting time of the tools, a colour for each number of jobs.

    A bar is the median of the rounds; its line goes from the least to the largest.
    """
    waits, numbers = (sorted({getattr(one, name) for one in found}) for name in ("wait_s", "num_jobs"))
    figure = blank(max(6.4, 3.4 * len(waits)), 3.0)
    panels = figure.subplots(1, len(waits), sharey=True, squeeze=False)[0]
    modes = list(dict.fromkeys(mode for one in found.values() for mode in one))
    for axes, wait_s in zip(panels, waits, strict=True):
        for at, num_jobs in enumerate(numbers):
            own = [one for workload, one in found.items() if (workload.wait_s, workload.num_jobs) == (wait_s, num_jobs)]
            for one in own:
                width = 0.8 / len(numbers)
                _bars(axes, one, modes, (at, (at + 0.5) * width - 0.4, width, f"{num_jobs} jobs"))
        axes.set_title(f"tools of {wait_s:g} s" if wait_s else "tools that do not wait", fontsize=10, color=INK)
        axes.set_xticks(range(len(modes)), [name_of(mode) for mode in modes], rotation=45, ha="right")
        plain(axes)
    panels[0].set_ylabel("steps/s", fontsize=9, color=INK)
    panels[0].legend(frameon=False, loc="upper left", fontsize=8)
    figure.savefig(path, format="png", dpi=100)


def _bars(axes: "Axes", found: Outlines, modes: Sequence[Mode], look: tuple[int, float, float, str]) -> None:
    """Draw the bars of a workload. look: its colour, offset, width and label."""
    number, offset, width, label = look
    own = [(modes.index(mode), [one.rate for one in rounds]) for mode, rounds in found.items()]
    middles = [median(rates) for _, rates in own]
    ends = [[middle - min(rates), max(rates) - middle] for middle, (_, rates) in zip(middles, own, strict=True)]
    places = [at + offset for at, _ in own]
    axes.bar(places, middles, width, color=of_run(number)[0], label=label)
    if any(len(rounds) > 1 for rounds in found.values()):
        axes.errorbar(places, middles, list(zip(*ends, strict=True)), fmt="none", ecolor=INK, elinewidth=1, capsize=2)


def draw_occupancy(folders: Mapping[str, Path], path: Path) -> None:
    """Draw how many jobs engine, environments and trainer worked for over time: a column for each run, a row for each lane."""
    runs = {name: on_common_time(list(_timelines(folder))) for name, folder in folders.items()}
    figure = blank(4.2 * len(runs), 4.2)
    panels = figure.subplots(len(LANES), len(runs), sharex="col", sharey="row", squeeze=False)
    for column, (name, timelines) in enumerate(runs.items()):
        length_s = max(one.end for one in timelines)
        edges = [number * length_s / _WINDOWS for number in range(_WINDOWS + 1)]
        for axes, lane in zip(panels[:, column], LANES, strict=True):
            counts = num_busy(timelines, lane, length_s, _WINDOWS)
            axes.stairs(counts, edges, fill=True, color=LANE_COLOURS[lane], alpha=0.8, linewidth=0)
            share = busy_share(timelines, lane, length_s) or 0.0
            mean = sum(counts) / len(counts)
            title = f"{name}, {lane}: busy {share:.0%} of the time, for {mean:.1f} jobs on average"
            axes.set_title(title, loc="left", fontsize=8, color=INK)
            plain(axes)
        panels[-1, column].set_xlabel("seconds", fontsize=9, color=INK)
    figure.savefig(path, format="png", dpi=100)


def _timelines(folder: Path) -> Iterable[Timeline]:
    """Yield the timelines of a run's jobs, each from its first turn on."""
    for path in _step_files(folder):
        steps = [read_line(StepRecord, line) for line in path.read_bytes().splitlines()]
        found = timeline(path.parent.name, read(path.parent), steps)
        if found is not None and found.engine:
            yield replace(found, begin=found.engine[0][0])


def _step_files(folder: Path) -> list[Path]:
    return sorted((folder / "run").glob("*/*/steps.jsonl"))


def draw_tenants(folder: Path, weights: Sequence[float], path: Path) -> None:
    """Draw the share of the engine that each tenant received, and that it was entitled to, over time."""
    tenants = sorted({one.parent.parent.name for one in _step_files(folder)})
    weight_of = dict(zip(tenants, weights, strict=False))
    services = [
        service(one.parent.parent.name, weight_of[one.parent.parent.name], read(one.parent))
        for one in _step_files(folder)
    ]
    found = shares(services)
    if found:
        figure = blank(9, shares_height(found))
        draw_shares(figure.subfigures(1, 1, squeeze=False)[0][0], found)
        figure.savefig(path, format="png", dpi=100)
