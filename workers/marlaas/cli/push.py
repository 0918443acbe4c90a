"""`marlaas push`: upload an adapter to the Hugging Face hub, with a model card."""

from pathlib import Path
from typing import Annotated

import typer

from marlaas.local.pushing import files_of
from marlaas.local.records import open_job
from marlaas.model_card import CARD, CONFIG, Files, base_of, config_of, own_card, plain_card, plain_files
from marlaas.models.hub import upload
from marlaas_api.errors import InvalidInput

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
    adapter, files = _files(folder, repository, job, agent)
    if card:
        text = files[CARD]
        typer.echo(text if isinstance(text, bytes) else text.read_bytes())
        return
    if not base_of(config_of(adapter)):
        typer.echo(
            f"note: {adapter} names a folder of this machine as its base model: others need that model to load it",
            err=True,
        )
    typer.echo(upload(repository, files, is_private=not public))


def _files(folder: Path, repository: str, job: str | None, agent: str | None) -> tuple[Path, Files]:
    """Return an adapter's folder, and the files to upload by their names in the repository."""
    if (folder / CONFIG).is_file():
        card = own_card(folder) or plain_card(repository, config_of(folder))
        return folder, plain_files(folder) | {CARD: card.encode()}
    opened = open_job(folder, job)
    names = [one.name for one in opened.document.spec.policies]
    if agent is None and len(names) > 1:
        raise InvalidInput(f"{opened.name} has several adapters: choose one with --agent {' or --agent '.join(names)}")
    chosen = agent or names[0]
    if chosen not in names:
        raise InvalidInput(
            f"{opened.name} has no adapter of agent {chosen}; agents with an adapter: {', '.join(names)}"
        )
    return opened.adapter_of(chosen), files_of(opened, chosen, repository)
