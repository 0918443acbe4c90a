"""`marlaas init`: create a starter project."""

from pathlib import Path
from typing import Annotated

import typer

from marlaas.scaffold import create

Name = Annotated[
    Path, typer.Argument(metavar="NAME", help="The project's folder, new or empty; its last part names the job.")
]


def init(folder: Name) -> None:
    """Write a ready project: an environment with its test, a manifest for a real model, a README.

    The environment asks for sums, in two turns if need be: change it into what your model should learn. Nothing is installed or started.

    Exit code: 0 written, 2 the name cannot be used or the folder is not empty.
    """
    for path in create(folder):
        typer.echo(path)
    typer.echo(
        f"\ncd {folder}, then: python -m pytest; marlaas validate job.yaml; marlaas run job.yaml --out runs/first"
    )
