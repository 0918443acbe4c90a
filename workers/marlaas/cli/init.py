"""`marlaas init`: create a starter project: an environment with its test, a manifest and a README.

The files come from `template/`, where `$name` and `$module` are replaced.
"""

import keyword
import re
import sys
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from marlaas.local.folder import translated, write
from marlaas_api.errors import InvalidInput
from marlaas_api.names import DNS_LABEL

_FILES = {
    "environment.py.txt": "{module}.py",
    "test_environment.py.txt": "test_{module}.py",
    "job.yaml.txt": "job.yaml",
    "README.md.txt": "README.md",
    "gitignore.txt": ".gitignore",
}
Name = Annotated[
    Path, typer.Argument(metavar="NAME", help="Folder of the project, new or empty. Its last part is the job's name.")
]


def init(folder: Name) -> None:
    """Create a starter project: an environment with its test, a manifest for a real model, a README.

    The environment asks for sums, in up to two turns; replace it with a task of your own. Nothing is installed or started.

    Exit code: 0 written, 2 the name is invalid or the folder is not empty.
    """
    for path in create(folder):
        typer.echo(path)
    typer.echo(
        f"\ncd {folder}, then: python -m pytest; marlaas validate job.yaml; marlaas run job.yaml --out runs/first"
    )


def project(name: str) -> dict[str, str]:
    """Return the text of every file of a project by its name. Raises InvalidInput if the name suits no job or no module."""
    module = _module(name)
    folder = files("marlaas.cli") / "template"
    texts = {target: (folder / source).read_text(encoding="utf-8") for source, target in _FILES.items()}
    return {
        target.format(module=module): Template(text).substitute(name=name, module=module)
        for target, text in texts.items()
    }


def create(folder: Path) -> list[Path]:
    """Write a project into the folder, named after it. Raises InvalidInput, also if the folder is not empty."""
    texts = project(folder.absolute().name)
    with translated(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidInput(f"{folder} exists and is not empty: choose another name")
    for name, text in texts.items():
        write(folder / name, text.encode())
    return [folder / name for name in texts]


def _module(name: str) -> str:
    """Return the Python module name for a job's name. Raises InvalidInput."""
    if not re.match(DNS_LABEL, name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        hint = f"; for example {near}" if near else ""
        raise InvalidInput(
            f"{name!r} is not a valid job name: use lower-case letters, digits and '-', at most 63 characters{hint}"
        )
    module = name.replace("-", "_")
    if not module.isidentifier() or keyword.iskeyword(module):
        raise InvalidInput(
            f"{name!r} is not a valid Python module name: it must begin with a letter and must not be a keyword"
        )
    if module in sys.stdlib_module_names or module in ("marlaas", "pytest"):
        raise InvalidInput(f"a module named {module!r} would shadow a standard or required module: choose another name")
    return module
