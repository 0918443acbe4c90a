"""Learning curve as a PNG: reward with its error band and the evaluations above, staleness and reply length below."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from marlaas.plots import figure
from marlaas.plots.series import eval_curve, length, reward_curve
from marlaas_api.messages import EvalRecord, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REWARD, _EVAL, _LENGTH, _STALE = figure.RUNS[:4]


def draw(title: str, steps: Sequence[StepRecord], evals: Sequence[EvalRecord], group_size: int) -> bytes:
    """Return the PNG. `steps` and `evals` are in order.

    On the axis, steps are counted from 1; 0 is before training. `group_size` is the number of episodes in a group,
    needed to compute the length of a trained episode.
    """
    figure = figure.blank(9, 6.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.1))
    _reward(above, steps, evals)
    _below(below, steps, [length(step, group_size) for step in steps])
    above.set_title(title, loc="left", fontsize=13, fontweight="bold", color=figure.INK, pad=10)
    for axes in (above, below):
        figure.plain(axes)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _reward(axes: "Axes", steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> None:
    reward, held_out = reward_curve(steps), eval_curve(evals)
    axes.fill_between(reward.xs, *reward.edges(), color=_REWARD, alpha=0.15, linewidth=0, label="± one standard error")
    axes.plot(reward.xs, reward.ys, color=_REWARD, linewidth=2, label="reward in training")
    axes.plot(held_out.xs, held_out.ys, "o--", color=_EVAL, linewidth=1.2, markersize=6, label="held-out tasks")
    for x, score in {held_out.points[0], held_out.points[-1]} if evals else set():
        axes.annotate(f"{score:.2f}", (x, score), (0, 8), textcoords="offset points", ha="center", color=_EVAL)
    axes.set_ylabel("reward", color=figure.INK)
    axes.margins(y=0.12)
    axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=figure.INK)


def _below(axes: "Axes", steps: Sequence[StepRecord], lengths: Sequence[float]) -> None:
    number = [record.step + 1 for record in steps]
    axes.bar(number, [record.staleness_mean for record in steps], width=0.8, color=_STALE, alpha=0.45)
    axes.set_ylabel("staleness", color=_STALE)
    axes.set_ylim(0, max(1.0, *(record.staleness_max for record in steps)) * 1.15 if steps else 1.0)
    axes.set_xlabel("step", color=figure.INK)
    if not np.isnan(lengths).all():
        other = axes.twinx()
        other.plot(number, lengths, color=_LENGTH, linewidth=1.6)
        other.set_ylabel("tokens per episode", color=_LENGTH)
        other.set_ylim(bottom=0)
        figure.plain(other)
        other.grid(visible=False)
        other.spines["right"].set(visible=True, color=figure.RULE)
