"""Figures of runs: panels of several jobs with their working times, one job's learning curve, and an HTML page.

matplotlib is imported only when a figure is drawn. Many jobs are coloured and grouped by tenant.
"""

import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from marlaas.plots.series import (
    EVAL,
    HELD_OUT_LOSS,
    REWARD,
    WALL,
    Curve,
    Interval,
    JobCurves,
    Timeline,
    agent_curve,
    eval_curve,
    length,
    panels_of,
    reward_curve,
    suite_curves,
    union,
)
from marlaas.plots.shares import TenantShares
from marlaas.plots.style import GROUPED_FROM, INK, LANE_COLOURS, RULE, RUNS, blank, of_run, plain, unit
from marlaas.plots.tenants import draw_shares, draw_timeline, shares_height, timeline_height
from marlaas_api.messages import EvalRecord, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

CURVE_FILE = "curve.png"
"""Name of the file with a job's curve, in its folder and in the repository of its adapter."""
_COLUMNS = 2
_ROW_INCHES, _LANE_INCHES = 2.1, 0.28
_LANES_PER_JOB = 4
"""Three lanes, and space for the job's name."""
_PIXELS = 1500


def draw(
    jobs: Sequence[JobCurves],
    timelines: Sequence[Timeline],
    kind: Literal["png", "svg"] = "png",
    shares: Sequence[TenantShares] = (),
) -> bytes:
    """Return the figure's bytes. The same input gives the same bytes."""
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "marlaas"}):
        buffer = io.BytesIO()
        # leave out the date and the library's version, so that a figure changes only with its data
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        _figure(jobs, timelines, shares).savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


def _figure(jobs: Sequence[JobCurves], timelines: Sequence[Timeline], shares: Sequence[TenantShares]) -> "Figure":
    many = len(timelines) >= GROUPED_FROM
    lanes = _LANE_INCHES * _LANES_PER_JOB * len(timelines) + 0.9 if timelines else 0.0
    heights = [
        math.ceil(len(panels_of(jobs)) / _COLUMNS) * _ROW_INCHES + 0.5,
        shares_height(shares),
        timeline_height(timelines) if many else lanes,
    ]
    figure = blank(11, sum(heights))
    used = [height for height in heights if height]
    # subfigures, so that the names of the lanes take no room from the panels
    parts = iter(figure.subfigures(len(used), 1, height_ratios=used, squeeze=False).flat)
    _panels(next(parts), jobs)
    if shares:
        draw_shares(next(parts), shares)
    if many:
        draw_timeline(next(parts), timelines)
    elif timelines:
        _timeline(next(parts).subplots(), timelines)
    return figure


def _panels(figure: "SubFigure", jobs: Sequence[JobCurves]) -> None:
    panels = panels_of(jobs)
    axes = figure.subplots(math.ceil(len(panels) / _COLUMNS), _COLUMNS)
    for panel, one in zip(panels, axes.flat, strict=False):
        _panel(one, panel, jobs)
    for unused in axes.flat[len(panels) :]:
        unused.set_axis_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    place = {"loc": "outside upper left", "ncols": 4}
    legend = figure.legend(handles, labels, frameon=False, fontsize=10, labelcolor=INK, **place)
    for line in legend.get_lines():
        line.set(linewidth=2, alpha=1)


def _panel(axes: "Axes", panel: str, jobs: Sequence[JobCurves]) -> None:
    from matplotlib.ticker import MaxNLocator

    drawn = False
    for job, look in zip(jobs, _looks(jobs), strict=True):
        drawn = _curve(axes, job.curves.get(panel, Curve(())), look, marked=panel in (EVAL, HELD_OUT_LOSS)) or drawn
    axes.set_title(panel, loc="left", fontsize=10, color=INK)
    if not drawn:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes, color=RULE)
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain(axes)


@dataclass(frozen=True, slots=True)
class _Look:
    """Colour and style of a job's curves, and its label in the legend; a label that begins with `_` is left out."""

    colour: str
    line: str
    label: str
    width: float = 1.7
    alpha: float = 1.0
    has_band: bool = True


def _looks(jobs: Sequence[JobCurves]) -> list[_Look]:
    """Return a look per job: few have a colour each, many the thin lines of their tenant's colour."""
    if len(jobs) < GROUPED_FROM:
        return [_Look(*of_run(index), job.name) for index, job in enumerate(jobs)]
    groups = sorted({job.group for job in jobs})
    first = {job.group: job for job in reversed(jobs)}
    return [
        _Look(*of_run(groups.index(job.group)), job.group if first[job.group] is job else "_", 0.9, 0.6, False)
        for job in jobs
    ]


def _curve(axes: "Axes", curve: Curve, look: _Look, marked: bool) -> bool:
    """Draw the curve; return False if it has no finite point."""
    if curve.band and look.has_band:
        axes.fill_between(curve.xs, *curve.edges(), color=look.colour, alpha=0.15, linewidth=0)
    alone = sum(map(math.isfinite, curve.ys)) == 1
    axes.plot(
        curve.xs,
        curve.ys,
        color=look.colour,
        linestyle=look.line,
        linewidth=look.width,
        alpha=look.alpha,
        marker="o" if marked or alone else "",
        markersize=5,
        label=look.label,
    )
    return any(map(math.isfinite, curve.ys))


def _timeline(axes: "Axes", timelines: Sequence[Timeline]) -> None:
    ticks, names, longest = [], [], max(one.end - one.begin for one in timelines)
    for index, one in enumerate(timelines):
        top = -index * _LANES_PER_JOB
        axes.text(0, top + 0.6, one.name, fontsize=9, color=of_run(index)[0], fontweight="bold", va="bottom")
        for number, (lane, intervals) in enumerate(one.lanes().items()):
            ticks.append(top - number)
            names.append(f"{lane}, {_share(one, intervals)}")
            _lane(axes, top - number, intervals, (one.begin, longest, LANE_COLOURS[lane]))
    name, unit_s = unit(longest)
    axes.set_yticks(ticks, names)
    axes.set_ylim(min(ticks) - 0.6, 1.3)
    axes.set_xlabel(name, color=INK)
    axes.set_xlim(0, longest / unit_s)
    axes.set_title(
        "working time of engine, environment and trainer, as a share of the run", loc="left", fontsize=10, color=INK
    )
    plain(axes, grid="x")


def _share(one: Timeline, intervals: Sequence[Interval] | None) -> str:
    return "not recorded" if intervals is None else f"{100 * one.share(intervals):.0f} %"


def _lane(axes: "Axes", place: float, intervals: Sequence[Interval] | None, scale: tuple[float, float, str]) -> None:
    """Draw the bars of one lane. Gaps narrower than a pixel are closed.

    `scale`: time at 0 (unix seconds), length of the axis in seconds, colour.
    """
    begin, whole_s, colour = scale
    if intervals is None:
        return
    _, unit_s = unit(whole_s)
    bars = [((a - begin) / unit_s, (b - a) / unit_s) for a, b in union(intervals, gap_s=whole_s / _PIXELS)]
    axes.broken_barh(bars, (place - 0.36, 0.72), color=colour, linewidth=0)


_CSS = """
body{font:15px/1.5 system-ui,sans-serif;color:#2b2f36;max-width:1150px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}th,td{padding:.2rem 1.2rem .2rem 0;text-align:right}
th:first-child,td:first-child{text-align:left}th{color:#7a7f87;font-weight:400}svg{width:100%;height:auto}
"""
_TABLE = ("job", "steps", "held out, before", "held out, after", "reward, last step", "minutes")


def page(title: str, jobs: Sequence[JobCurves], svg: bytes) -> bytes:
    """Return an HTML page: a table of the jobs' results, and the figure."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in _TABLE)
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in _cells(job))}</tr>" for job in jobs)
    text = svg.decode()
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_CSS}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<table><tr>{head}</tr>{rows}</table>{text[text.index('<svg') :]}</body></html>\n"
    ).encode()


def _cells(job: JobCurves) -> list[str]:
    none = Curve(())
    evals, rewards, walls = (job.curves.get(panel, none).ys for panel in (EVAL, REWARD, WALL))
    ends = [evals[0] if evals else math.nan, evals[-1] if len(evals) > 1 else math.nan, *(rewards[-1:] or [math.nan])]
    return [job.name, str(len(rewards)), *(_number(value) for value in ends), f"{sum(walls) / 60:.1f}"]


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "·"


_REWARD_INK, _EVAL_INK, _LENGTH_INK, _STALE_INK = RUNS[:4]


def draw_curve(title: str, steps: Sequence[StepRecord], evals: Sequence[EvalRecord], group_size: int) -> bytes:
    """Return the PNG. `steps` and `evals` are in order.

    On the axis, steps are counted from 1; 0 is before training. `group_size` is the number of episodes in a group,
    needed to compute the length of a trained episode.
    """
    figure = blank(9, 6.2, fitted=False)
    figure.subplots_adjust(left=0.08, right=0.92, top=0.93, bottom=0.08, hspace=0.08)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.1))
    _reward_axes(above, steps, evals)
    _staleness_axes(below, steps, [length(step, group_size) for step in steps])
    above.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK, pad=10)
    for axes in (above, below):
        plain(axes)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _reward_axes(axes: "Axes", steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> None:
    reward, held_out = reward_curve(steps), eval_curve(evals)
    axes.fill_between(
        reward.xs, *reward.edges(), color=_REWARD_INK, alpha=0.15, linewidth=0, label="± one standard error"
    )
    axes.plot(reward.xs, reward.ys, color=_REWARD_INK, linewidth=2, label="reward in training")
    agents = list(dict.fromkeys(agent for step in steps for agent in step.agents))
    for number, agent in enumerate(agents if len(agents) > 1 else ()):
        own, (colour, _) = agent_curve(agent, steps), of_run(number + 4)
        axes.plot(own.xs, own.ys, color=colour, linewidth=1, alpha=0.8, label=agent)
    axes.plot(held_out.xs, held_out.ys, "o--", color=_EVAL_INK, linewidth=1.2, markersize=6, label="held-out tasks")
    for number, (name, curve) in enumerate(suite_curves(evals).items()):
        axes.plot(curve.xs, curve.ys, ".--", color=of_run(number + 8)[0], linewidth=0.8, alpha=0.8, label=name)
    for x, score in {held_out.points[0], held_out.points[-1]} if evals else set():
        axes.annotate(f"{score:.2f}", (x, score), (0, 8), textcoords="offset points", ha="center", color=_EVAL_INK)
    axes.set_ylabel("reward", color=INK)
    axes.margins(y=0.12)
    axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=INK)


def _staleness_axes(axes: "Axes", steps: Sequence[StepRecord], lengths: Sequence[float]) -> None:
    number = [record.step + 1 for record in steps]
    axes.bar(number, [record.staleness_mean for record in steps], width=0.8, color=_STALE_INK, alpha=0.45)
    axes.set_ylabel("staleness", color=_STALE_INK)
    axes.set_ylim(0, max(1.0, *(record.staleness_max for record in steps)) * 1.15 if steps else 1.0)
    axes.set_xlabel("step", color=INK)
    if not all(map(math.isnan, lengths)):
        other = axes.twinx()
        other.plot(number, lengths, color=_LENGTH_INK, linewidth=1.6)
        other.set_ylabel("tokens per episode", color=_LENGTH_INK)
        other.set_ylim(bottom=0)
        plain(other)
        other.grid(visible=False)
        other.spines["right"].set(visible=True, color=RULE)
