"""`marlaas push`: upload an adapter to the Hugging Face hub, a bucket or a folder, with a model card."""

from pathlib import Path
from typing import Annotated

import typer

from marlaas.adapter_folder import CARD, CONFIG, Files
from marlaas.local.pushing import files_of, folder_marker, marker_in
from marlaas.local.records import open_job
from marlaas.model_card import base_of, config_of, files_with, own_card, plain_card
from marlaas.uploads import named_target
from marlaas_api.errors import InvalidInput

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="Output folder of `marlaas run`, a job's folder in it, or the folder of a PEFT adapter."
    ),
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="Repository on the hub, OWNER/NAME, made if it does not exist; s3://BUCKET/PREFIX; or a folder, which begins with / or . or ~.",
    ),
]
Job = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job, if the run has several.")]
Agent = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the agent, if the job has several.")]
Public = Annotated[
    bool, typer.Option("--public/--private", help="Who sees a repository of the hub that this command makes.")
]
Card = Annotated[bool, typer.Option("--card", help="Print the model card, and upload nothing.")]


def push(
    folder: Folder,
    target: Target,
    job: Job = None,
    agent: Agent = None,
    public: Public = False,
    card: Card = False,
) -> None:
    """Upload an adapter to the Hugging Face hub, a bucket or a folder, with a model card.

    The card names the base model, environment, algorithm, settings, digests of the data and evaluations of the run, beside its curve. A card of
    your own, README.md in the adapter's folder, is used instead. On the hub, all files are one commit; in a bucket and a folder, marlaas.json is written last. An adapter of a cluster is fetched first: marlaas adapter.

    The hub's token is that of `hf auth login`, or HF_TOKEN; HF_ENDPOINT names another hub. A bucket takes AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_REGION and AWS_ENDPOINT_URL. Running the command again replaces the files.

    Exit code: 0 uploaded, 2 there is no such adapter, or the target refuses it (the error says why).
    """
    there = named_target(target, is_private=not public)
    adapter, files, marker = _files(folder, there.loaded_as(target), job, agent)
    if card:
        text = files[CARD]
        typer.echo(text if isinstance(text, bytes) else text.read_bytes())
        return
    if not base_of(config_of(adapter)):
        typer.echo(
            f"note: {adapter} names a folder of this machine as its base model: others need that model to load it",
            err=True,
        )
    there.require([target])
    typer.echo(there.put(target, files, marker))


def _files(folder: Path, loaded_as: str, job: str | None, agent: str | None) -> tuple[Path, Files, bytes]:
    """Return an adapter's folder, the files to upload by name, and their marker."""
    if (folder / CONFIG).is_file():
        card = own_card(folder) or plain_card(loaded_as, config_of(folder))
        return folder, files_with(folder, card, None), folder_marker(folder)
    opened = open_job(folder, job)
    names = [one.name for one in opened.document.spec.policies]
    if agent is None and len(names) > 1:
        raise InvalidInput(f"{opened.name} has several adapters: choose one with --agent {' or --agent '.join(names)}")
    chosen = agent or names[0]
    if chosen not in names:
        raise InvalidInput(
            f"{opened.name} has no adapter of agent {chosen}; agents with an adapter: {', '.join(names)}"
        )
    return opened.adapter_of(chosen), files_of(opened, chosen, loaded_as), marker_in(opened, chosen)
