"""`marlaas data`: look at the data sets of jobs before they train."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlaas.chat.conversations import conversation_line, speaker_name
from marlaas.cli.app import FAILED, complain
from marlaas.environment import Split, Task
from marlaas.manifest.data_sets import DataJob, data_jobs
from marlaas_api.errors import InvalidInput

app = typer.Typer(help=__doc__, rich_markup_mode="markdown")

Files = Annotated[list[str], typer.Argument(metavar="FILE", help="YAML manifests; - is standard input.")]
Num = Annotated[int, typer.Option("--num", "-n", min=0, metavar="N", help="Tasks to show of each job.")]
SplitOption = Annotated[Split, typer.Option(help="Show training tasks or held-out tasks.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def _data() -> None:
    """Handle the options that stand before the subcommand."""


@app.command("show", epilog="Example: `marlaas data show examples/word-problems.yaml -n 5`", no_args_is_help=True)
def show(files: Files, num: Num = 5, split: SplitOption = Split.TRAIN, as_json: Json = False) -> None:
    """Show the first tasks of a data set as a job plays them: prompts with their tokens, truths, and the rewards of two known replies.

    The truth itself as a reply must have the full reward, and an empty reply must not. Every row is rendered; rows that cannot be used are
    errors with file and line. Warnings on standard error report repeated prompts, prompts that are too long for the pool, and rewards that
    are not as they must be. Of a suite's data set, the held-out tasks are shown. Nothing is started. The results are kept in the user's cache, so that a job starts faster.

    Exit code: 0 shown, 1 a reward raised an exception, 2 the input must be changed.
    """
    found = {}
    for job in data_jobs(files):
        found[job.name] = _shown(job, num, split, as_json)
    if as_json:
        typer.echo(json.dumps({"jobs": found}, indent=2, ensure_ascii=False))


def _shown(job: DataJob, num: int, split: Split, as_json: bool) -> dict[str, Any]:
    """Show a job's data set, unless as JSON; return its facts. Exits if a reward raises an exception."""
    from marlaas.envs.dataset import report
    from marlaas.envs.loading import resolve
    from marlaas.envs.playing import explain

    sys.path.insert(0, str(job.folder))
    resolve("dataset", job.args)
    data = _opened(job)
    count = None if job.reader is None else job.reader.count
    facts = {one: report.part_facts(data.tasks.part(one), count) for one in Split}
    limits = report.Limits(None if job.pool is None else job.pool.spec.rollout.max_model_len, job.max_tokens)
    num_trained = None if job.suite is not None else job.job.spec.training.data.tasks
    notes = [*data.notes, *report.warnings(data.tasks, facts, limits, num_trained)]
    split = split if job.suite is None else Split.EVAL
    if data.rewards is not None and data.rewards.left_out:
        notes.append(f"rewards are shown without {', '.join(data.rewards.left_out)}, which only the job can give")
    try:
        tasks = list(report.shown(data, split, num, count, None if job.reader is None else job.reader.trained))
    except InvalidInput:
        raise
    except Exception as error:
        complain(explain(error))
        raise typer.Exit(FAILED) from None
    files = [{"file": str(one.file), "sha256": one.sha256} for one in data.tasks.files()]
    if not as_json:
        _print(job, files, facts, tasks)
        if job.sft is not None:
            rows = job.sft.steps * job.sft.rows_per_step
            passes = rows / facts[Split.TRAIN].num_rows
            typer.echo(
                f"\n{job.sft.steps} steps of {job.sft.rows_per_step} rows: {passes:.2f} passes over the training rows"
            )
        for text in [*notes, *(text for one in tasks for text in report.task_warnings(one))]:
            complain(f"warning: {text}")
    return {
        "files": files,
        "splits": {
            one.value: {
                "rows": of.num_rows,
                "repeated": of.num_repeated,
                "longestPromptTokens": of.longest and of.longest[1],
            }
            for one, of in facts.items()
        },
        "dropped": data.tasks.num_dropped,
        "warnings": notes,
        "tasks": [report.as_json(one) for one in tasks],
    }


def _opened(job: DataJob) -> Any:
    from marlaas.envs.dataset.environment import Dataset
    from marlaas.envs.dataset.index import in_processes

    try:
        with in_processes():
            data = Dataset(**job.args)
        if job.demonstrates:
            data.demonstrate(Task(Split.TRAIN, 0, 0))
        return data
    except InvalidInput as error:
        problems = getattr(error, "problems", None) or [str(error)]
        raise InvalidInput("\n".join(f"{job.name}: {text}" for text in problems)) from error


def _print(job: DataJob, files: Sequence[dict[str, str]], facts: Any, tasks: Sequence[Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    train, held_out = facts[Split.TRAIN], facts[Split.EVAL]
    console.print(
        Text(f"{job.name}: {train.num_rows:,} training rows, {held_out.num_rows:,} held-out rows", style="bold")
    )
    for file in files:
        console.print(f"  {file['file']}  sha256 {file['sha256'][:16]}")
    longest = max((one.longest for one in (train, held_out) if one.longest), key=lambda one: one[1], default=None)
    if longest is not None:
        console.print(f"  longest prompt: {longest[1]:,} tokens ({longest[0]})")
    elif job.reader is None:
        console.print("  the tokenizer of the pool's model is not on this machine, so tokens are not counted")
    for one in tasks:
        _print_task(console, one)


def _print_task(console: Console, one: Any) -> None:
    console.print(Text(f"\ntask {one.index}  {one.task.place}", style="bold"))
    for message in one.task.rendered.conversation or one.task.rendered.prompt:
        console.print(conversation_line(speaker_name(message.role, None), message.content, message.role))
    table = Table.grid(padding=(0, 2))
    if one.tokens is not None:
        table.add_row("tokens", str(one.tokens))
    for reply in one.trained:
        table.add_row("trained", Text(reply.problem or f"{reply.num_tokens} tokens: {reply.text}"))
    if one.of_truth is not None:
        table.add_row("truth", Text(one.task.rendered.truth))
        table.add_row("reward of the truth", f"{one.of_truth.reward:g}")
    if one.of_empty is not None:
        table.add_row("reward of an empty reply", f"{one.of_empty.reward:g}")
    console.print(table)
