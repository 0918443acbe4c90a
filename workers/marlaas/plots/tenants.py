"""Drawing of many jobs: each tenant's share over time, and the work of engine, environment and trainer grouped by tenant."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from marlaas.plots.occupancy import LANES, busy_share, by_group, merged, num_busy, on_common_time
from marlaas.plots.series import Interval, Timeline, union
from marlaas.plots.shares import TenantShares
from marlaas.plots.style import GRID, INK, LANE_COLOURS, of_run, plain, unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

_SHARE_COLUMNS, _SHARE_INCHES = 2, 1.15
_COUNT_INCHES, _ROW_INCHES = 1.0, 0.17
_MAX_JOB_ROWS = 64
"""With more jobs, the timeline has one row per tenant."""
_WINDOWS, _PIXELS = 160, 1500


def shares_height(shares: Sequence[TenantShares]) -> float:
    """Return the height of the shares in inches."""
    return math.ceil(len(shares) / _SHARE_COLUMNS) * _SHARE_INCHES + 0.8 if shares else 0.0


def draw_shares(figure: "SubFigure", shares: Sequence[TenantShares]) -> None:
    """Draw one panel per tenant: the received share as an area, the entitled share as a line."""
    rows = math.ceil(len(shares) / _SHARE_COLUMNS)
    panels = figure.subplots(rows, _SHARE_COLUMNS, sharex=True, sharey=True, squeeze=False)
    longest_s = len(shares[0].received) * shares[0].window_s
    name, unit_s = unit(longest_s)
    for index, (axes, one) in enumerate(zip(panels.flat, shares, strict=False)):
        _share(axes, one, of_run(index)[0], unit_s)
    for axes in panels.flat[len(shares) :]:
        axes.set_visible(False)
    panels.flat[0].set_ylim(0, 1)
    panels.flat[0].set_xlim(0, longest_s / unit_s)
    for axes in panels.flat[max(0, len(shares) - _SHARE_COLUMNS) : len(shares)]:
        axes.set_xlabel(name, color=INK, fontsize=9)
        axes.tick_params(labelbottom=True)
    figure.suptitle(
        "share of the engines' tokens (area) and share by weight among active tenants (line), "
        f"means of {shares[0].window_s:.0f} s",
        x=0.01,
        ha="left",
        fontsize=10,
        color=INK,
    )


def _share(axes: "Axes", one: TenantShares, colour: str, unit_s: float) -> None:
    edges = [number * one.window_s / unit_s for number in range(len(one.received) + 1)]
    received = [0.0 if math.isnan(value) else value for value in one.received]
    axes.stairs(received, edges, fill=True, color=colour, alpha=0.55, linewidth=0)
    axes.stairs(one.entitled, edges, baseline=None, color=INK, linewidth=1.3)
    text = f"{one.tenant}, weight {one.weight:g}: received {one.received_all:.0%}, entitled {one.entitled_all:.0%}"
    axes.set_title(text, loc="left", fontsize=9, color=colour, fontweight="bold")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_yticks([0, 0.5, 1])
    plain(axes)


def timeline_height(timelines: Sequence[Timeline]) -> float:
    """Return the height of the timeline in inches."""
    return len(LANES) * _COUNT_INCHES + _row_height(_rows(timelines)) + 1.0


def draw_timeline(figure: "SubFigure", timelines: Sequence[Timeline]) -> None:
    """Draw how many jobs each lane worked for, stacked by tenant, and below one row per job (of very many: per tenant)."""
    moved = on_common_time(timelines)
    length_s = max(one.end for one in moved)
    name, unit_s = unit(length_s)
    rows = _rows(moved)
    heights = [*[_COUNT_INCHES] * len(LANES), _row_height(rows)]
    panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for axes, lane in zip(panels[:-1], LANES, strict=True):
        _count(axes, lane, moved, (length_s, unit_s))
    _draw_rows(panels[-1], rows, (length_s, unit_s))
    panels[-1].set_xlabel(name, color=INK)
    panels[-1].set_xlim(0, length_s / unit_s)


def _count(axes: "Axes", lane: str, timelines: Sequence[Timeline], scale: tuple[float, float]) -> None:
    """Draw one lane. scale: length of the axis, and of its unit, in seconds."""
    length_s, unit_s = scale
    edges = [number * length_s / _WINDOWS / unit_s for number in range(_WINDOWS + 1)]
    below = [0.0] * _WINDOWS
    for index, group in enumerate(by_group(timelines).values()):
        above = [low + more for low, more in zip(below, num_busy(group, lane, length_s, _WINDOWS), strict=True)]
        axes.stairs(above, edges, baseline=below, fill=True, color=of_run(index)[0], alpha=0.8, linewidth=0)
        below = above
    busy = busy_share(timelines, lane, length_s)
    text = "not recorded" if busy is None else f"busy for at least one in {busy:.0%} of the time"
    axes.set_title(f"{lane}: jobs at work, by tenant; {text}", loc="left", fontsize=9, color=INK)
    axes.set_ylim(bottom=0)
    plain(axes)


_Rows = Mapping[str, Sequence[Timeline]]


def _rows(timelines: Sequence[Timeline]) -> _Rows:
    groups = by_group(timelines)
    if len(timelines) <= _MAX_JOB_ROWS:
        return groups
    return {"": [merged(f"{name} ({len(jobs)} jobs)", jobs) for name, jobs in groups.items()]}


def _row_height(rows: _Rows) -> float:
    return sum(len(jobs) + 1 for jobs in rows.values()) * _ROW_INCHES


def _draw_rows(axes: "Axes", rows: _Rows, scale: tuple[float, float]) -> None:
    """Draw a heading per tenant and a row per job: thin bars of the lanes on a pale bar from the job's begin to its end."""
    from matplotlib.patches import Patch

    unit_s = scale[1]
    place, ticks, names = 0.0, [], []
    for index, (group, jobs) in enumerate(rows.items()):
        axes.text(0, place, group, fontsize=8, color=of_run(index)[0], fontweight="bold", va="center")
        for one in jobs:
            place -= 1
            ticks.append(place)
            names.append(one.name)
            axes.broken_barh([(one.begin / unit_s, (one.end - one.begin) / unit_s)], (place - 0.4, 0.8), color=GRID)
            for number, lane in enumerate(LANES):
                bars = _bars(one.lanes()[lane] or (), scale)
                axes.broken_barh(bars, (place + 0.14 - 0.27 * number, 0.26), color=LANE_COLOURS[lane], linewidth=0)
            axes.text(1.005, place, _percents(one), fontsize=7, va="center", transform=axes.get_yaxis_transform())
        place -= 1
    axes.set_yticks(ticks, names)
    axes.set_ylim(place + 0.4, 0.6)
    plain(axes, grid="x")
    axes.tick_params(axis="y", labelsize=7, length=0)
    axes.set_title("each job, with its shares of its own time on the right", loc="left", fontsize=9, color=INK)
    colours = [Patch(color=LANE_COLOURS[lane], label=lane) for lane in LANES]
    where = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axes.legend(handles=colours, ncols=len(LANES), frameon=False, fontsize=8, **where)


def _bars(intervals: Sequence[Interval], scale: tuple[float, float]) -> list[Interval]:
    length_s, unit_s = scale
    return [(low / unit_s, (high - low) / unit_s) for low, high in union(intervals, gap_s=length_s / _PIXELS)]


def _percents(one: Timeline) -> str:
    parts = ("·" if part is None else f"{one.share(part):.0%}" for part in one.lanes().values())
    return "  ".join(parts)
