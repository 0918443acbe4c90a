"""`marlaas init`: create a starter project: an environment with its test, a manifest and a README.

The files come from `template/`, where `$name` and `$module` are replaced. The folder may have any name: the names of
the job and of the Python module are derived from it.
"""

import keyword
import re
import shlex
import sys
import unicodedata
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from marlaas.local.folder import translated, write
from marlaas_api.errors import InvalidInput

_FILES = {
    "environment.py.txt": "{module}.py",
    "test_environment.py.txt": "test_{module}.py",
    "job.yaml.txt": "job.yaml",
    "README.md.txt": "README.md",
    "gitignore.txt": ".gitignore",
}
_MAX_NAME = 63
"""Characters of a job's name, which is a DNS label."""
_TAKEN = sys.stdlib_module_names | {"marlaas", "pytest"}
"""Modules that a project must not shadow."""
Folder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="Folder of the project, new or empty. The job is named after it: first_sums gives the job first-sums.",
    ),
]


def init(folder: Folder) -> None:
    """Create a starter project: an environment with its test, a manifest for a real model, a README.

    The environment asks for sums, in up to two turns; replace it with a task of your own. Nothing is installed or started.

    Exit code: 0 written, 2 the folder is not empty.
    """
    for path in create(folder):
        typer.echo(path)
    typer.echo(
        f"\ncd {shlex.quote(str(folder))}, then: python -m pytest; marlaas validate job.yaml; "
        "marlaas run job.yaml --out runs/first"
    )


def create(folder: Path) -> list[Path]:
    """Write a project into the folder and return its files. Raises InvalidInput if the folder is not empty."""
    texts = project(folder.resolve().name)
    with translated(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidInput(f"{folder} exists and is not empty: choose another name")
    for name, text in texts.items():
        write(folder / name, text.encode())
    return [folder / name for name in texts]


def project(folder_name: str) -> dict[str, str]:
    """Return the text of every file of a project, by the file's name."""
    name = job_name(folder_name)
    module = module_name(name)
    folder = files("marlaas.cli") / "template"
    texts = {target: (folder / source).read_text(encoding="utf-8") for source, target in _FILES.items()}
    return {
        target.format(module=module): Template(text).substitute(name=name, module=module)
        for target, text in texts.items()
    }


def job_name(folder_name: str) -> str:
    """Return the job's name for a folder's name: lower-case ASCII letters, digits and hyphens, at most 63.

    Accents are dropped; all other characters separate words. A name without any letter or digit gives `my-job`.
    """
    plain = unicodedata.normalize("NFKD", folder_name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:_MAX_NAME].rstrip("-") or "my-job"


def module_name(job: str) -> str:
    """Return the name of the environment's module for a job's name: an identifier that shadows no module."""
    module = job.replace("-", "_")
    if not module.isidentifier():
        return f"env_{module}"
    return f"{module}_env" if keyword.iskeyword(module) or module in _TAKEN else module
