"""Style of all figures: colours for the colour-blind, thin rules, no boxes. Imports matplotlib only when it draws."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, RULE, GRID = "#2b2f36", "#b8bec7", "#e6e9ee"
RUNS = ("#3b6fb6", "#d1495b", "#4a8f6d", "#8d6a9f", "#c98a2b", "#3f9fae", "#7a7f87", "#a0522d")
"""Okabe and Ito's hues with lower saturation. The ninth job has the first colour again, with a dashed line."""
ENGINE, ENVIRONMENT, TRAINER = "#3b6fb6", "#c98a2b", "#4a8f6d"
LANES = {"engine": ENGINE, "environment": ENVIRONMENT, "trainer": TRAINER}


def blank(width: float, height: float) -> "Figure":
    """Return an empty white figure; sizes are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: "Axes", grid: Literal["x", "y"] = "y") -> None:
    """Draw thin rules below and to the left, and a pale grid behind."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(RULE)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def of_run(index: int) -> tuple[str, str]:
    """Return the colour and line style of the n-th job of a figure."""
    return RUNS[index % len(RUNS)], "-" if index < len(RUNS) else "--"
