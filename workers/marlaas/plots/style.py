"""Colours, empty figures and axes that all figures share. Colours suit the colour-blind."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUPED_FROM = 9
"""Number of jobs from which figures are coloured and grouped by tenant."""
INK, RULE, GRID = "#2b2f36", "#b8bec7", "#e6e9ee"
RUNS = ("#3b6fb6", "#d1495b", "#4a8f6d", "#8d6a9f", "#c98a2b", "#3f9fae", "#7a7f87", "#a0522d")
"""Okabe and Ito's hues with lower saturation. The ninth job has the first colour again, with a dashed line."""
LANE_COLOURS = {"engine": "#3b6fb6", "environment": "#c98a2b", "trainer": "#4a8f6d"}


def blank(width: float, height: float, *, fitted: bool = True) -> "Figure":
    """Return an empty white figure; sizes are in inches. fitted: matplotlib computes the margins, which is half of the cost of a small figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, facecolor="white", layout="constrained" if fitted else None)
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


def unit(longest_s: float) -> tuple[str, float]:
    """Return the unit of a time axis, and its length in seconds."""
    return ("minutes", 60.0) if longest_s > 180 else ("seconds", 1.0)
