"""Changes of a run on this machine while it goes on: `marlaas submit`, `suspend`, `resume` and `cancel` with `--run DIR`."""

from collections.abc import Sequence
from pathlib import Path

import typer

from marlaas.local.changes import RunChange, ask
from marlaas.local.documents import read
from marlaas.local.folder import OutFolder
from marlaas.local.records import OpenedJob, open_jobs
from marlaas.trackers.seam import require
from marlaas_api.errors import InvalidInput


def submit_to_run(folder: Path, files: Sequence[str]) -> None:
    """Add or change the jobs of manifests. Raises InvalidInput, also with all findings in the manifests."""
    wanted = read(files, None)
    require(wanted.jobs)
    for note in wanted.notes:
        typer.echo(note)
    paths = tuple(str(Path(file).absolute()) for file in files if file != "-")
    folders = {key: path.absolute() for key, path in wanted.folders.items()}
    _ask(folder, RunChange(jobs=wanted.jobs, folders=folders, files=paths))


def suspend_in_run(folder: Path, name: str, namespace: str | None, suspend: bool) -> None:
    """Suspend or resume a job. Raises InvalidInput."""
    _ask(folder, RunChange(suspend={_key(folder, name, namespace): suspend}))


def cancel_in_run(folder: Path, name: str, namespace: str | None) -> None:
    """End a job and forget it. Raises InvalidInput."""
    _ask(folder, RunChange(cancel=(_key(folder, name, namespace),)))


def _ask(folder: Path, change: RunChange) -> None:
    for line in ask(OutFolder(folder.absolute()), change):
        typer.echo(line)


def _key(folder: Path, name: str, namespace: str | None) -> str:
    return named_job(folder, name, namespace).document.ref.key


def named_job(folder: Path, name: str, namespace: str | None) -> OpenedJob:
    """Return the job of a name. Raises InvalidInput if no job of the run, or several, have the name."""
    found = open_jobs(folder, name if namespace is None else f"{namespace}/{name}")
    if len(found) > 1:
        raise InvalidInput(f"{folder} has {' and '.join(one.name for one in found)}: choose one with -n NAMESPACE")
    return found[0]
