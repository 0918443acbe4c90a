"""`marlaas run`: turn the command line into a run, and its result into an exit code."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import IO, Annotated, NoReturn, cast

import typer

from marlaas.cli.app import INVALID, complain
from marlaas.cli.standard_files import LossyOutput
from marlaas.episodes.files import DEFAULT_BYTES
from marlaas.local.credentials import keep_to_oneself
from marlaas.local.display import choose
from marlaas.local.runner import RunRequest
from marlaas.local.runner import run as run_jobs
from marlaas.manifest.objects import without_pipes
from marlaas_api.errors import MarlaasError
from marlaas_api.numeric import LARGEST_INTEGER

Files = Annotated[
    list[str], typer.Argument(metavar="FILE…", help="YAML manifests with ModelPools, Tenants and RLJobs.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Output folder; a run in it is continued. [default: runs/NAME of the first file]"
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, max=LARGEST_INTEGER, metavar="N", help="Seed that replaces the manifests' seeds."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead of the table.")]
Nats = Annotated[
    str | None,
    typer.Option("--nats", metavar="URL", help="URL of an existing NATS server, instead of an embedded one."),
]
Creds = Annotated[
    Path | None, typer.Option("--creds", metavar="FILE", help="NATS credentials file for the server of --nats.")
]
Keep = Annotated[
    int,
    typer.Option("--keep-episodes", min=0, metavar="MIB", help="Disk space for each job's episodes; 0 stores none."),
]
Replicas = Annotated[
    int | None,
    typer.Option("--replicas", min=1, max=64, metavar="N", help="Engines of each pool. [default: the pool's]"),
]
Trainers = Annotated[
    int | None,
    typer.Option("--trainers", min=1, max=64, metavar="N", help="Trainers of each pool. [default: the pool's]"),
]
_KEEP_MIB = DEFAULT_BYTES >> 20


def run(
    files: Files,
    out: Out = None,
    seed: Seed = None,
    json: Json = False,
    nats: Nats = None,
    creds: Creds = None,
    keep: Keep = _KEEP_MIB,
    replicas: Replicas = None,
    trainers: Trainers = None,
) -> None:
    """Train the jobs of manifests on this machine.

    Takes the same manifests as a cluster. Starts a NATS server, engines, trainers and sandboxes as local processes and shows the jobs'
    progress. Writes summary.json into the output folder and, for each job, its adapter (a PEFT folder), learning curve, records, episodes
    and logs. `marlaas episodes DIR`, `marlaas plot DIR` and `marlaas chat DIR` show them, during the run and afterwards.

    Without a reader of its output (`| head`, a closed pipe) the run goes on silently. A signal that the parent ignores stays ignored (`nohup`).

    Ctrl-C drains the run, and the same command continues it later; a second Ctrl-C ends it at once. A killed run can be continued too.

    Exit code: 0 every job succeeded, 1 a job did not succeed, 2 the input must be changed first (the error says how), 130 stopped by Ctrl-C.
    """
    folder = out or Path("runs") / (Path(without_pipes(files)[0]).stem.strip("-.") or "stdin")
    if creds is not None and nats is None:
        complain("--creds needs --nats URL: the embedded server creates its own credentials")
        raise typer.Exit(INVALID)
    options: dict[str, object] = {
        "--out": folder,
        "--seed": seed,
        "--nats": nats,
        "--creds": creds,
        "--keep-episodes": keep if keep != _KEEP_MIB else None,
        "--replicas": replicas,
        "--trainers": trainers,
    }
    again = _again(files, options, json)
    request = RunRequest(tuple(files), folder, seed, nats, creds, again)
    execute(replace(request, episodes_bytes=keep << 20, replicas=replicas, trainers=trainers), json)


def execute(request: RunRequest, json: bool) -> NoReturn:
    """Run the jobs, show them as a table or as JSON, and exit with the run's code."""
    display = choose(json, cast(IO[str], LossyOutput(sys.stdout)))
    keep_to_oneself()
    try:
        code = run_jobs(request, display)
    except MarlaasError as error:
        display.refused(str(error))
        complain(str(error))
        code = INVALID
    raise typer.Exit(code)


def _again(files: list[str], options: dict[str, object], json: bool) -> tuple[str, ...]:
    """Return the command that continues this run. Options without a value are left out."""
    given = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    return ("marlaas", "run", *without_pipes(files), *given, *(["--json"] if json else []))
