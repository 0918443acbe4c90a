"""`marlaas validate`: check manifests and print the findings."""

import json
from typing import Annotated, Any

import typer

from marlaas.cli.app import INVALID, complain
from marlaas.cli.cluster_options import Context, Kubeconfig, Namespace, gateway
from marlaas.cli.summaries import summary
from marlaas.cluster.submission import preview
from marlaas.manifest import Finding, InvalidManifest, LoadedManifest, load
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import Kind, ModelPool, RLJob

Files = Annotated[list[str], typer.Argument(metavar="FILE", help="YAML manifests; - is standard input.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Server = Annotated[bool, typer.Option("--server", help="Also check on the cluster's API server, by a dry run.")]


def validate(
    files: Files,
    as_json: Json = False,
    server: Server = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Check manifests, and report errors by file, line and field.

    Checks everything that needs no cluster, and starts nothing: fields, types and bounds, whether jobs fit their pools, whether environments
    exist and accept their arguments, and the models on this machine. A pool that is not in the files is assumed to be in the cluster. With --server,
    the cluster's API server checks them too, in a dry run: its own rules, fields of existing jobs that must not change, and your permissions.

    Notes on standard error report valid settings with a side effect, and problems that would prevent `marlaas run` on this machine.

    Exit code: 0 valid, 1 the cluster of --server cannot be reached, 2 the input must be changed.
    """
    if not server and (context or namespace or kubeconfig):
        raise InvalidInput("--context, --namespace and --kubeconfig need --server")
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
        typer.echo(json.dumps(_result(manifest), indent=2))
    else:
        _print_summary(manifest)


def _print_summary(manifest: LoadedManifest) -> None:
    for note in manifest.notes:
        complain(f"note: {note}")
    for one in _objects(manifest):
        typer.echo(f"{type(one).__name__} {_name(one)}: {summary(one)}")
        if isinstance(one, ModelPool) and (room := manifest.cache_rooms.get(_name(one))):
            typer.echo(f"  KV cache of an engine: {room}")


def _result(manifest: LoadedManifest) -> dict[str, Any]:
    objects = [{"kind": type(one).__name__, "name": _name(one), "summary": summary(one)} for one in _objects(manifest)]
    return {"valid": True, "objects": objects, "notes": [_finding(note) for note in manifest.notes]}


def _objects(manifest: LoadedManifest) -> tuple[Kind, ...]:
    return (*manifest.pools, *manifest.tenants, *manifest.jobs)


def _name(one: Kind) -> str:
    return f"{one.metadata.namespace}/{one.metadata.name}" if isinstance(one, RLJob) else one.metadata.name


def _finding(finding: Finding) -> dict[str, Any]:
    return {"file": finding.file, "line": finding.line, "path": finding.path, "text": finding.text}
