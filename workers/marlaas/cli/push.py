"""`marlaas push`: upload an adapter to the Hugging Face hub, with a model card."""

import json
from pathlib import Path
from typing import Annotated

import typer

from marlaas.local.card import base_of, job_card, plain_card
from marlaas.local.curves import CURVE_FILE
from marlaas.local.records import open_job
from marlaas.models.hub import upload
from marlaas_api.errors import InvalidInput

CONFIG, CARD = "adapter_config.json", "README.md"

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="Output folder of `marlaas run`, a job's folder in it, or the folder of a PEFT adapter."
    ),
]
Repository = Annotated[
    str, typer.Argument(metavar="REPO", help="Repository on the hub, OWNER/NAME; made if it does not exist.")
]
Job = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job, if the run has several.")]
Agent = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the agent, if the job has several.")]
Public = Annotated[bool, typer.Option("--public/--private", help="Who sees a repository that this command makes.")]
Card = Annotated[bool, typer.Option("--card", help="Print the model card, and upload nothing.")]


def push(
    folder: Folder,
    repository: Repository,
    job: Job = None,
    agent: Agent = None,
    public: Public = False,
    card: Card = False,
) -> None:
    """Upload an adapter to the Hugging Face hub, with a model card.

    The card names the base model, environment, algorithm, settings, digests of the data and evaluations of the run, beside its curve. A card of
    your own, README.md in the adapter's folder, is used instead. All files are one commit. An adapter of a cluster is fetched first: marlaas adapter.

    The token is that of `hf auth login`, or HF_TOKEN; HF_ENDPOINT names another hub. Running the command again replaces the files.

    Exit code: 0 uploaded, 2 there is no such adapter, or the hub refuses it (the error says why).
    """
    adapter, text, extra = _adapter(folder, repository, job, agent)
    if card:
        typer.echo(text)
        return
    if not base_of(_config(adapter)):
        typer.echo(
            f"note: {adapter} names a folder of this machine as its base model: others need that model to load it",
            err=True,
        )
    files: dict[str, Path | bytes] = {one.name: one for one in sorted(adapter.iterdir()) if one.is_file()}
    files |= {one.name: one for one in extra if one.exists()}
    typer.echo(upload(repository, files | {CARD: text.encode()}, is_private=not public))


def _adapter(folder: Path, repository: str, job: str | None, agent: str | None) -> tuple[Path, str, tuple[Path, ...]]:
    """Return an adapter's folder, its card, and further files."""
    if (folder / CONFIG).is_file():
        return folder, _own_card(folder) or plain_card(repository, _config(folder)), ()
    opened = open_job(folder, job)
    names = [one.name for one in opened.document.spec.policies]
    if agent is None and len(names) > 1:
        raise InvalidInput(f"{opened.name} has several adapters: choose one with --agent {' or --agent '.join(names)}")
    chosen = agent or names[0]
    if chosen not in names:
        raise InvalidInput(
            f"{opened.name} has no adapter of agent {chosen}; agents with an adapter: {', '.join(names)}"
        )
    adapter = opened.adapter_of(chosen)
    if not (adapter / CONFIG).is_file():
        raise InvalidInput(f"{opened.name} has no adapter in {adapter} yet; a run writes it when it ends or is stopped")
    return (
        adapter,
        _own_card(adapter) or job_card(repository, opened, chosen, _config(adapter)),
        (opened.folder / CURVE_FILE,),
    )


def _own_card(folder: Path) -> str:
    return (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else ""


def _config(folder: Path) -> dict[str, object]:
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{folder / CONFIG} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{folder / CONFIG} is no JSON object")
    return found
