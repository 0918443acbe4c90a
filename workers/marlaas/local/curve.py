"""The learning curve as a PNG: reward with its band and the evaluations above, staleness and reply length below."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from marlaas_api.messages import EvalRecord, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RULE = "#b8bec7"
_INK, _REWARD, _EVAL, _STALE, _LENGTH = "#2b2f36", "#3b6fb6", "#d1495b", "#8d6a9f", "#4a8f6d"


def draw(title: str, steps: Sequence[StepRecord], evals: Sequence[EvalRecord], group_size: int) -> bytes:
    """Return the PNG; steps and evals in order, steps counted from 1 on the axis as people do, 0 is before training.

    group_size: episodes in a group, from which the length of a trained episode follows.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.2), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.1))
    _reward(above, steps, evals)
    _below(below, steps, _lengths(steps, group_size))
    above.set_title(title, loc="left", fontsize=13, fontweight="bold", color=_INK, pad=10)
    for axes in (above, below):
        _plain(axes)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _reward(axes: "Axes", steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> None:
    number = np.array([record.step + 1 for record in steps], dtype=float)
    mean = np.array([record.reward_mean for record in steps], dtype=float)
    std = np.array([record.reward_std for record in steps], dtype=float)
    axes.fill_between(number, mean - std, mean + std, color=_REWARD, alpha=0.13, linewidth=0, label="± one deviation")
    axes.plot(number, mean, color=_REWARD, linewidth=2, label="reward in training")
    at = [record.step for record in evals]
    score = [record.reward_mean for record in evals]
    axes.plot(at, score, "o--", color=_EVAL, linewidth=1.2, markersize=6, label="held-out tasks")
    for index in {0, len(evals) - 1} if evals else set():
        axes.annotate(
            f"{score[index]:.2f}",
            (at[index], score[index]),
            (0, 8),
            textcoords="offset points",
            ha="center",
            color=_EVAL,
        )
    axes.set_ylabel("reward", color=_INK)
    axes.margins(y=0.12)
    axes.legend(loc="best", frameon=False, fontsize=9, labelcolor=_INK)


def _below(axes: "Axes", steps: Sequence[StepRecord], lengths: Sequence[float]) -> None:
    number = [record.step + 1 for record in steps]
    axes.bar(number, [record.staleness_mean for record in steps], width=0.8, color=_STALE, alpha=0.45)
    axes.set_ylabel("staleness", color=_STALE)
    axes.set_ylim(0, max(1.0, *(record.staleness_max for record in steps)) * 1.15 if steps else 1.0)
    axes.set_xlabel("step", color=_INK)
    if not np.isnan(lengths).all():
        other = axes.twinx()
        other.plot(number, lengths, color=_LENGTH, linewidth=1.6)
        other.set_ylabel("tokens per episode", color=_LENGTH)
        other.set_ylim(bottom=0)
        _plain(other)
        other.grid(visible=False)
        other.spines["right"].set(visible=True, color=_RULE)


def _lengths(steps: Sequence[StepRecord], group_size: int) -> list[float]:
    """Generated tokens per trained episode; NaN for a step that trained none."""
    nan = float("nan")
    trained = [record.num_groups * group_size for record in steps]
    return [r.metrics.get("tokens", nan) / n if n else nan for r, n in zip(steps, trained, strict=True)]


def _plain(axes: "Axes") -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_RULE)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#e6e9ee", linewidth=0.8)
    axes.set_axisbelow(True)
