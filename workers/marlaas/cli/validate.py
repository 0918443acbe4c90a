"""`marlaas validate`: check manifests and print the findings."""

import json
from typing import Annotated, Any

import typer

from marlaas.cli.app import INVALID, complain
from marlaas.cli.cluster import Context, Kubeconfig, Namespace, gateway
from marlaas.cli.summaries import summary
from marlaas.cluster.submission import preview
from marlaas.manifest import Finding, InvalidManifest, LoadedManifest, load
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import Kind, RLJob

Files = Annotated[list[str], typer.Argument(metavar="FILE", help="Manifests in YAML; - reads standard input.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")]
Server = Annotated[bool, typer.Option("--server", help="Ask the cluster too; nothing is changed there.")]


def validate(
    files: Files,
    as_json: Json = False,
    server: Server = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Say what is wrong with manifests, by file, line and field.

    Checks everything that needs no cluster and starts nothing: fields, types and bounds, whether jobs fit their pools, whether environments
    exist and take their arguments, what the models that lie here can do. A pool that is not in the files is thought to be in the cluster. With --server, the
    cluster's API server is asked too (a dry run): its own rules, what may not change of a job that exists, and what you may do.

    Notes, on standard error, say what is right and worth knowing; also what would keep `marlaas run` from running it on this machine.

    Exit code: 0 all is right, 1 the cluster of --server could not be asked, 2 something must be changed.
    """
    if not server and (context or namespace or kubeconfig):
        raise InvalidInput(
            "--context, --namespace and --kubeconfig say which cluster --server asks: give --server as well"
        )
    try:
        manifest = load(files, runnable=False)
        if server:
            preview(gateway(context, namespace, kubeconfig), manifest.placed)
    except InvalidManifest as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"valid": False, "errors": [_finding(one) for one in error.findings]}, indent=2))
        raise typer.Exit(INVALID) from error
    if as_json:
        typer.echo(json.dumps(_verdict(manifest), indent=2))
    else:
        _tell(manifest)


def _tell(manifest: LoadedManifest) -> None:
    for note in manifest.notes:
        complain(f"note: {note}")
    for one in _objects(manifest):
        typer.echo(f"{type(one).__name__} {_name(one)}: {summary(one)}")


def _verdict(manifest: LoadedManifest) -> dict[str, Any]:
    objects = [{"kind": type(one).__name__, "name": _name(one), "summary": summary(one)} for one in _objects(manifest)]
    return {"valid": True, "objects": objects, "notes": [_finding(note) for note in manifest.notes]}


def _objects(manifest: LoadedManifest) -> tuple[Kind, ...]:
    return (*manifest.pools, *manifest.tenants, *manifest.jobs)


def _name(one: Kind) -> str:
    return f"{one.metadata.namespace}/{one.metadata.name}" if isinstance(one, RLJob) else one.metadata.name


def _finding(finding: Finding) -> dict[str, Any]:
    return {"file": finding.file, "line": finding.line, "path": finding.path, "text": finding.text}
