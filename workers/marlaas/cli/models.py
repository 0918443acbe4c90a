"""`marlaas models`: list the builtin base models and prepare one on this machine's disk."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from marlaas.models import BuiltinModel, list_models, prepare, prepared

app = typer.Typer(help="Show and prepare the builtin base models.", rich_markup_mode="markdown")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a builtin model (see `marlaas models list`).")]
Json = Annotated[bool, typer.Option("--json", help="Print a JSON list.")]


@app.command("list", epilog="Example: `marlaas models list`")
def show(as_json: Json = False) -> None:
    """Show the builtin base models, smallest first, and which of them are prepared on this machine.

    A ModelPool selects one with `model: {builtin: NAME}`. Models of the Hugging Face hub and local folders need no preparation.
    """
    if as_json:
        typer.echo(json.dumps([_facts(model) for model in list_models()], indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("NAME", "SIZE", "PREPARED", "DESCRIPTION"):
        table.add_column(heading, no_wrap=heading != "DESCRIPTION")
    for model in list_models():
        table.add_row(model.name, _size(model), _state(model), model.description)
    Console(highlight=False).print(table)


@app.command("prepare", epilog="Example: `marlaas models prepare tiny`")
def bring(name: Name) -> None:
    """Build or unpack a builtin base model, unless it is prepared already, and print its folder.

    `marlaas run` does this by itself. The folder is in Hugging Face format, in $MARLAAS_CACHE or the user's cache folder.
    """
    with _progress(name) as report:
        folder = prepare(name, progress=report)
    typer.echo(folder)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on standard error, so that standard output holds only the folder."""
    columns = (TextColumn("preparing {task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _facts(model: BuiltinModel) -> dict[str, object]:
    folder = prepared(model.name)
    return {
        "name": model.name,
        "description": model.description,
        "license": model.license,
        "sizeBytes": model.size_bytes,
        "folder": str(folder) if folder else None,
    }


def _size(model: BuiltinModel) -> str:
    return f"{model.size_bytes / 1e6:.3g} MB"


def _state(model: BuiltinModel) -> str:
    return "yes" if prepared(model.name) else f"no, about {model.prepare_s} s"
