"""`marlaas eval`: evaluate a manifest's jobs without training them."""

from pathlib import Path
from typing import Annotated

import typer

from marlaas.cli.run import Files, Json, Out, Replicas, Seed, execute
from marlaas.local.runner import RunRequest
from marlaas.manifest.objects import without_pipes

Adapter = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[AGENT=]DIR",
        help="PEFT adapter to evaluate, of this agent if the job has several; may be repeated. [default: the job's first version]",
    ),
]


def evaluate(
    files: Files,
    adapter: Adapter = None,
    out: Out = None,
    seed: Seed = None,
    json: Json = False,
    replicas: Replicas = None,
) -> None:
    """Evaluate the jobs of manifests on this machine, without training.

    Plays the held-out tasks of each job's evaluation, or of its suites, with the base model or with the adapters of --adapter,
    which any PEFT training may have made. Shows the rewards and writes summary.json, records and episodes into the output folder.

    On a cluster, a job with `training.steps: 0` does the same.

    Exit code: 0 every job was evaluated, 1 a job was not, 2 the input must be changed first (the error says how), 130 stopped by Ctrl-C.
    """
    stem = Path(without_pipes(files)[0]).stem.strip("-.") or "stdin"
    folder = out or Path("runs") / f"{stem}-eval"
    adapters = dict(_named(text) for text in adapter or ())
    given = [text for one in adapter or () for text in ("--adapter", one)]
    given += ["--out", str(folder), *([] if seed is None else ["--seed", str(seed)])]
    again = ("marlaas", "eval", *without_pipes(files), *given)
    execute(RunRequest(tuple(files), folder, seed, again=again, replicas=replicas, adapters=adapters), json)


def _named(text: str) -> tuple[str, Path]:
    agent, equals, folder = text.partition("=")
    return (agent, Path(folder)) if equals and "/" not in agent else ("", Path(text))
