"""Commands that read a run's output folder: `marlaas episodes` shows recorded episodes, `marlaas plot` draws curves."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from marlaas.episodes import files, show
from marlaas.episodes.prompts import PromptTexts
from marlaas.episodes.record import EpisodeRecord
from marlaas.episodes.selection import EpisodeFilter, EpisodeOrder, JobContext, Played, chosen, comparison_of, placed
from marlaas.local.folder import write
from marlaas.local.records import OpenedJob, open_jobs
from marlaas.plots.figure import draw, page
from marlaas.plots.series import JobCurves, Timeline, job_curves, timeline
from marlaas.plots.shares import TenantService, TenantShares, service, shares
from marlaas_api.errors import InvalidInput
from marlaas_api.names import Split

FOLLOW_S = 0.5

Dir = Annotated[Path, typer.Argument(metavar="DIR", help="Output folder of `marlaas run`, or a job's folder in it.")]
Job = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job. [default: all]")]
Step = Annotated[int | None, typer.Option(min=0, metavar="N", help="Only episodes of step N, counted from 0.")]
Worst = Annotated[bool, typer.Option("--worst", help="Lowest reward first.")]
Best = Annotated[bool, typer.Option("--best", help="Highest reward first.")]
Random = Annotated[bool, typer.Option("--random", help="Random order.")]
SplitOption = Annotated[Split | None, typer.Option(help="Only training tasks, or only held-out tasks.")]
Faults = Annotated[
    bool, typer.Option("--faults", help="Only episodes that ended with a fault, or were played again after one.")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Keep showing episodes as they end, until Ctrl-C.")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=0, metavar="N", help="Maximum number of episodes.")]
Tokens = Annotated[bool, typer.Option("--tokens", help="Show the token ids of each reply.")]
Prompts = Annotated[
    bool,
    typer.Option("--prompts", help="Show prompts as the model read them, with its template. Loads its tokenizer."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line, with token ids and logprobs.")]


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
    prompts: Prompts = False,
    as_json: Json = False,
) -> None:
    """Show recorded episodes of a run: messages, replies, tool output, reward, advantage, version, stop reason, fault.

    Works during the run. Without --worst, --best or --random, the latest episodes are shown in order of time. The text is the engine's decoding
    of the generated tokens, after the part of the assistant's message that the chat template or the environment has begun. --tokens shows
    the token ids, on which the trainer trains.

    The run stores them in DIR/NAMESPACE/NAME/episodes.jsonl, older ones compressed beside it, up to 256 MiB per job (`marlaas run --keep-episodes`).

    Exit code: 0 success, 2 the folder or job does not exist.
    """
    choice = EpisodeFilter(step, split, faults, _order(worst, best, any_), limit)
    jobs = open_jobs(folder, job)
    console = Console(highlight=False)
    tails = [files.EpisodeFollower(one.folder) for one in jobs] if follow else []
    found = chosen([one for opened in jobs for one in _placed(opened)], choice, random.Random())
    texts = PromptTexts(_models(jobs)) if prompts else None
    _show_episodes(console, found, tokens, as_json, texts)
    if not found and not follow and not as_json:
        console.print(_nothing(jobs, choice))
    while follow:
        time.sleep(FOLLOW_S)
        for opened, tail in zip(jobs, tails, strict=True):
            fresh = [one for one in _placed(opened, tail.news()) if chosen([one], choice, random.Random())]
            _show_episodes(console, fresh, tokens, as_json, texts)


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
    around = JobContext(opened.name, spec.group_size, comparison_of(spec), opened.steps(), spec.agents)
    if fresh is None:
        return placed(files.read(opened.folder), around)
    ids = {record.episode for record in fresh}
    return [one for one in placed(files.read(opened.folder), around) if one.record.episode in ids] if ids else []


def _models(jobs: Sequence[OpenedJob]) -> dict[tuple[str, str], Path]:
    """Return the folder of each agent's base model."""
    return {
        (one.name, agent.name): Path(one.pool_of(agent).model_path)
        for one in jobs
        for agent in one.document.spec.agents
    }


def _show_episodes(
    console: Console, found: Sequence[Played], tokens: bool, as_json: bool, prompts: PromptTexts | None
) -> None:
    for one in found:
        if as_json:
            typer.echo(show.as_json(one, prompts))
        else:
            console.print(show.rich(one, tokens=tokens, prompts=prompts))


def _nothing(jobs: Sequence[OpenedJob], choice: EpisodeFilter) -> str:
    kept = any(files.parts(one.folder) or (one.folder / files.OPEN).exists() for one in jobs)
    if not kept:
        return "No episodes are recorded: none has ended yet, or the run was started with --keep-episodes 0."
    where = f" of step {choice.step}" if choice.step is not None else ""
    return f"No episode{where} matches."


Dirs = Annotated[list[Path], typer.Argument(metavar="DIR…", help="Output folders of `marlaas run`, or jobs' folders.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", help="File to write: .png, .svg or .html. [default: DIR/plot.png]"),
]
JobOfEach = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job in each folder. [default: all]")]


@dataclass(frozen=True, slots=True)
class LabelledJob:
    """A job of a figure: its label, that of its tenant, and the folder that was asked for."""

    label: str
    group: str
    run: str
    opened: OpenedJob


def plot(folders: Dirs, out: Out = None, job: JobOfEach = None) -> None:
    """Plot reward, held-out reward, length, entropy, KL, logprob gap, staleness, seconds per step, and working times.

    Several folders are plotted in one figure, one colour per job. Lanes below the curves show per job when the engine generated, when the environment
    ran between turns and when the trainer computed, each with its share of the whole time. Many jobs are coloured and grouped by tenant. Of a run with
    several tenants, the shares of the engines' tokens that each received and was entitled to are drawn over time. Works during the run.

    Writes PNG, SVG, or a self-contained HTML page with a table of the results. Prints the file's path.

    Exit code: 0 success, 2 the folder or job does not exist, or the file type is unknown.
    """
    target = out or folders[0] / "plot.png"
    render = _renderer(target)
    jobs = _labelled(folders, job)
    drawn = [_drawn(one) for one in jobs]
    is_one_run = len({one.run for one in jobs}) == 1
    times = [one.timeline for one in drawn if one.timeline is not None]
    write(
        target,
        render(
            [curves for one in drawn for curves in one.curves],
            times,
            shares(one.service for one in drawn) if is_one_run else (),
        ),
    )
    typer.echo(target)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Data of one job's part of a figure."""

    curves: Sequence[JobCurves]
    timeline: Timeline | None
    service: TenantService


def _drawn(job: LabelledJob) -> _Drawn:
    opened, steps = job.opened, job.opened.steps()
    document, episodes = opened.document, list(files.read(opened.folder))
    times = timeline(job.label, episodes, steps)
    return _Drawn(
        [replace(one, group=job.group) for one in job_curves(job.label, document, steps, opened.evals())],
        None if times is None else replace(times, run=job.run, group=job.group),
        service(document.tenant, document.tenant_weight, episodes),
    )


Renderer = Callable[[Sequence[JobCurves], Sequence[Timeline], Sequence[TenantShares]], bytes]


def _renderer(target: Path) -> Renderer:
    renderers: dict[str, Renderer] = {
        ".png": lambda curves, times, drawn: draw(curves, times, "png", drawn),
        ".svg": lambda curves, times, drawn: draw(curves, times, "svg", drawn),
        ".html": lambda curves, times, drawn: page(_title(curves), curves, draw(curves, times, "svg", drawn)),
    }
    found = renderers.get(target.suffix.lower())
    if found is None:
        raise InvalidInput(f"--out {target}: expected a file name that ends in {', '.join(renderers)}")
    return found


def _title(curves: Sequence[JobCurves]) -> str:
    return ", ".join(one.name for one in curves)


def _labelled(folders: Sequence[Path], job: str | None) -> list[LabelledJob]:
    """Return jobs with unique labels. If there are several folders, the labels include the folder's name."""
    opened = [(folder.absolute(), one) for folder in folders for one in open_jobs(folder, job)]
    several = len({folder for folder, _ in opened}) > 1
    found = []
    for folder, one in opened:
        prefix = f"{folder.name}: " if several else ""
        found.append(LabelledJob(f"{prefix}{one.name}", f"{prefix}{one.document.tenant}", str(folder), one))
    return found
