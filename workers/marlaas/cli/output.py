"""Commands that read a run's output folder: `marlaas episodes` shows recorded episodes, `marlaas plot` draws curves."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from marlaas.episodes import files, show
from marlaas.episodes.record import EpisodeRecord
from marlaas.episodes.selection import EpisodeFilter, EpisodeOrder, JobContext, Played, advantages_of, chosen, placed
from marlaas.local.folder import write
from marlaas.local.records import OpenedJob, open_jobs
from marlaas.plots.figure import draw, page
from marlaas.plots.series import JobCurves, Timeline, job_curves, timeline
from marlaas_api.errors import InvalidInput
from marlaas_api.names import Split

FOLLOW_S = 0.5

Dir = Annotated[Path, typer.Argument(metavar="DIR", help="Output folder of `marlaas run`, or a job's folder in it.")]
Job = Annotated[str | None, typer.Option(metavar="NAME", help="Only this job.")]
Step = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Only episodes that step N resolved, counted from 0.")
]
Worst = Annotated[bool, typer.Option("--worst", help="Lowest reward first.")]
Best = Annotated[bool, typer.Option("--best", help="Highest reward first.")]
Random = Annotated[bool, typer.Option("--random", help="Any, drawn anew each time.")]
SplitOption = Annotated[Split | None, typer.Option(help="Only tasks trained on, or those held out.")]
Faults = Annotated[bool, typer.Option("--faults", help="Only what died of a fault, or was played again after one.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Then show episodes as they end, until Ctrl-C.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=0, metavar="N", help="How many at most.")]
Tokens = Annotated[bool, typer.Option("--tokens", help="Token ids of every reply as well.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line, for machines: token ids, logprobs, all.")]


def episodes(
    folder: Dir,
    job: Job = None,
    step: Step = None,
    worst: Worst = False,
    best: Best = False,
    any_: Random = False,
    split: SplitOption = None,
    faults: Faults = False,
    follow: Follow = False,
    limit: Limit = 5,
    tokens: Tokens = False,
    as_json: Json = False,
) -> None:
    """Read real episodes of a run: what was asked, every reply and tool answer, reward, advantage, version, stop reason, fault.

    Works while the run goes on. Without --worst, --best or --random the latest are shown, in the order of time. The text is the engine's reading
    of the tokens that it generated; --tokens shows the ids, which are what is trained on.

    The run keeps them in DIR/NAMESPACE/NAME/episodes.jsonl, older ones compressed beside it, 256 MiB a job (`marlaas run --keep-episodes`).

    Exit code: 0 shown, 2 no such folder or job.
    """
    choice = EpisodeFilter(step, split, faults, _order(worst, best, any_), limit)
    jobs = open_jobs(folder, job)
    console = Console(highlight=False)
    tails = [files.EpisodeFollower(one.folder) for one in jobs] if follow else []
    found = chosen([one for opened in jobs for one in _placed(opened)], choice, random.Random())
    _show_episodes(console, found, tokens, as_json)
    if not found and not follow and not as_json:
        console.print(_nothing(jobs, choice))
    while follow:
        time.sleep(FOLLOW_S)
        for opened, tail in zip(jobs, tails, strict=True):
            fresh = [one for one in _placed(opened, tail.news()) if chosen([one], choice, random.Random())]
            _show_episodes(console, fresh, tokens, as_json)


def _order(worst: bool, best: bool, any_: bool) -> EpisodeOrder:
    asked = [
        order
        for order, flag in ((EpisodeOrder.WORST, worst), (EpisodeOrder.BEST, best), (EpisodeOrder.RANDOM, any_))
        if flag
    ]
    if len(asked) > 1:
        raise InvalidInput(f"--{asked[0]} and --{asked[1]} exclude each other: choose one")
    return asked[0] if asked else EpisodeOrder.LATEST


def _placed(opened: OpenedJob, fresh: Sequence[EpisodeRecord] | None = None) -> list[Played]:
    spec = opened.document.spec
    around = JobContext(opened.name, spec.rollout.group_size, opened.steps(), advantages_of(spec))
    if fresh is None:
        return placed(files.read(opened.folder), around)
    ids = {record.episode for record in fresh}
    return [one for one in placed(files.read(opened.folder), around) if one.record.episode in ids] if ids else []


def _show_episodes(console: Console, found: Sequence[Played], tokens: bool, as_json: bool) -> None:
    for one in found:
        if as_json:
            typer.echo(show.as_json(one))
        else:
            console.print(show.rich(one, tokens=tokens))


def _nothing(jobs: Sequence[OpenedJob], choice: EpisodeFilter) -> str:
    kept = any(files.parts(one.folder) or (one.folder / files.OPEN).exists() for one in jobs)
    if not kept:
        return "No episodes are kept here: none has ended yet, or the run was told --keep-episodes 0."
    where = f" of step {choice.step}" if choice.step is not None else ""
    return f"No episode{where} is like that."


Dirs = Annotated[list[Path], typer.Argument(metavar="DIR…", help="Output folders of `marlaas run`, or jobs' folders.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="Where to: .png, .svg or .html. [default: DIR/plot.png]"),
]
JobOfEach = Annotated[str | None, typer.Option(metavar="NAME", help="Only this job of each folder.")]


def plot(folders: Dirs, out: Out = None, job: JobOfEach = None) -> None:
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
