"""`marlaas plot`: plot one or several runs in one figure."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from marlaas.episodes import files
from marlaas.local.folder import write
from marlaas.local.records import OpenedJob, open_jobs
from marlaas.plots.figure import draw, page
from marlaas.plots.series import JobCurves, Timeline, job_curves, timeline
from marlaas_api.errors import InvalidInput

Dirs = Annotated[list[Path], typer.Argument(metavar="DIR…", help="Output folders of `marlaas run`, or jobs' folders.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Where to: .png, .svg or .html. [default: DIR/plot.png]"),
]
Job = Annotated[str | None, typer.Option(metavar="NAME", help="Only this job of each folder.")]


def plot(folders: Dirs, out: Out = None, job: Job = None) -> None:
    """Draw reward, held-out reward, length, entropy, KL, logprob gap, staleness and seconds per step, and who worked when.

    Several folders go into one picture, a colour per job. Below the curves, per job: when the engine generated for it, when its environment
    was busy between turns, when the trainer computed, with the share of the whole time. Works while the run goes on.

    PNG, SVG, or an HTML page of its own that loads nothing and holds a table of the results as well. Prints the file's path.

    Exit code: 0 drawn, 2 no such folder or job, or no such kind of file.
    """
    target = out or folders[0] / "plot.png"
    render = _renderer(target)
    jobs = [(label, opened) for label, opened in _labelled(folders, job)]
    curves = [job_curves(label, opened.document, opened.steps(), opened.evals()) for label, opened in jobs]
    times = [timeline(label, files.read(opened.folder), opened.steps()) for label, opened in jobs]
    write(target, render(curves, [one for one in times if one is not None]))
    typer.echo(target)


Renderer = Callable[[Sequence[JobCurves], Sequence[Timeline]], bytes]


def _renderer(target: Path) -> Renderer:
    renderers: dict[str, Renderer] = {
        ".png": lambda curves, times: draw(curves, times, "png"),
        ".svg": lambda curves, times: draw(curves, times, "svg"),
        ".html": lambda curves, times: page(_title(curves), curves, draw(curves, times, "svg")),
    }
    found = renderers.get(target.suffix.lower())
    if found is None:
        raise InvalidInput(f"--out {target}: expected a name that ends in {', '.join(renderers)}")
    return found


def _title(curves: Sequence[JobCurves]) -> str:
    return ", ".join(one.name for one in curves)


def _labelled(folders: Sequence[Path], job: str | None) -> list[tuple[str, OpenedJob]]:
    """Return jobs with unique labels. If there are several folders, the label includes the folder's name."""
    opened = [(folder, one) for folder in folders for one in open_jobs(folder, job)]
    several = len({folder.absolute() for folder, _ in opened}) > 1
    return [(f"{folder.absolute().name}: {one.name}" if several else one.name, one) for folder, one in opened]
