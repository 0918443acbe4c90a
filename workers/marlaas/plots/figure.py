"""Figure of one or several jobs: eight panels over steps, and below them the working times of engine, environment and trainer."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from marlaas.plots import style
from marlaas.plots.series import EVAL, PANELS, Curve, JobCurves
from marlaas.plots.timeline import Interval, Timeline, union

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_COLUMNS = 2
_ROW_INCHES, _LANE_INCHES = 2.1, 0.28
_LANES_PER_JOB = 4
"""Three lanes, and space for the job's name."""
_PIXELS = 1500


def draw(jobs: Sequence[JobCurves], timelines: Sequence[Timeline], kind: Literal["png", "svg"] = "png") -> bytes:
    """Return the figure's bytes. The same input gives the same bytes."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "marlaas"}):
        buffer = io.BytesIO()
        # leave out the date and the library's version, so that a figure changes only with its data
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        _figure(jobs, timelines).savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


def _figure(jobs: Sequence[JobCurves], timelines: Sequence[Timeline]) -> "Figure":
    above = math.ceil(len(PANELS) / _COLUMNS) * _ROW_INCHES + 0.5
    below = _LANE_INCHES * _LANES_PER_JOB * len(timelines) + 0.9 if timelines else 0.0
    figure = style.blank(11, above + below)
    # two subfigures, so that the names of the lanes take no room from the panels
    parts = figure.subfigures(
        2 if timelines else 1, 1, height_ratios=[above, below] if timelines else None, squeeze=False
    )
    _panels(parts[0, 0], jobs)
    if timelines:
        _timeline(parts[1, 0].subplots(), timelines)
    return figure


def _panels(figure: "SubFigure", jobs: Sequence[JobCurves]) -> None:
    axes = figure.subplots(math.ceil(len(PANELS) / _COLUMNS), _COLUMNS)
    for panel, one in zip(PANELS, axes.flat, strict=False):
        _panel(one, panel, jobs)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=10, labelcolor=style.INK)


def _panel(axes: "Axes", panel: str, jobs: Sequence[JobCurves]) -> None:
    from matplotlib.ticker import MaxNLocator

    drawn = False
    for index, job in enumerate(jobs):
        drawn = _curve(axes, job.curves.get(panel, Curve(())), index, job.name, marked=panel == EVAL) or drawn
    axes.set_title(panel, loc="left", fontsize=10, color=style.INK)
    if not drawn:
        axes.text(0.5, 0.5, "nothing on record", ha="center", transform=axes.transAxes, color=style.RULE)
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.plain(axes)


def _curve(axes: "Axes", curve: Curve, index: int, name: str, marked: bool) -> bool:
    """Draw the curve; return False if it has no finite point."""
    colour, line = style.of_run(index)
    if curve.band:
        axes.fill_between(curve.xs, *curve.edges(), color=colour, alpha=0.15, linewidth=0)
    alone = sum(map(math.isfinite, curve.ys)) == 1
    marker = "o" if marked or alone else ""
    axes.plot(curve.xs, curve.ys, color=colour, linestyle=line, linewidth=1.7, marker=marker, markersize=5, label=name)
    return any(map(math.isfinite, curve.ys))


def _timeline(axes: "Axes", timelines: Sequence[Timeline]) -> None:
    ticks, names, longest = [], [], max(one.end - one.begin for one in timelines)
    for index, one in enumerate(timelines):
        top = -index * _LANES_PER_JOB
        axes.text(0, top + 0.6, one.name, fontsize=9, color=style.of_run(index)[0], fontweight="bold", va="bottom")
        for number, (lane, intervals) in enumerate(one.lanes().items()):
            ticks.append(top - number)
            names.append(f"{lane}, {_share(one, intervals)}")
            _lane(axes, top - number, intervals, (one.begin, longest, style.LANES[lane]))
    unit_s = _unit_s(longest)
    axes.set_yticks(ticks, names)
    axes.set_ylim(min(ticks) - 0.6, 1.3)
    axes.set_xlabel("minutes" if unit_s > 1 else "seconds", color=style.INK)
    axes.set_xlim(0, longest / unit_s)
    axes.set_title("who worked when, and for which share of the time", loc="left", fontsize=10, color=style.INK)
    style.plain(axes, grid="x")


def _unit_s(longest_s: float) -> float:
    return 60.0 if longest_s > 180 else 1.0


def _share(one: Timeline, intervals: Sequence[Interval] | None) -> str:
    return "not recorded" if intervals is None else f"{100 * one.share(intervals):.0f} %"


def _lane(axes: "Axes", place: float, intervals: Sequence[Interval] | None, scale: tuple[float, float, str]) -> None:
    """Draw the bars of one lane. Gaps narrower than a pixel are closed.

    `scale`: time at 0 (unix seconds), length of the axis in seconds, colour.
    """
    begin, whole_s, colour = scale
    if intervals is None:
        return
    unit_s = _unit_s(whole_s)
    bars = [((a - begin) / unit_s, (b - a) / unit_s) for a, b in union(intervals, gap_s=whole_s / _PIXELS)]
    axes.broken_barh(bars, (place - 0.36, 0.72), color=colour, linewidth=0)
