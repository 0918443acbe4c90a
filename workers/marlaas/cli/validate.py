"""`marlaas validate`: check manifests and print the findings."""

import json
import re
from typing import Annotated, Any

import typer

from marlaas.cli.app import INVALID, complain
from marlaas.cli.cluster_options import Context, Kubeconfig, Namespace, gateway
from marlaas.cli.memory_table import memory_facts, memory_lines
from marlaas.cli.summaries import summary
from marlaas.cluster.estimating import estimates as cluster_estimates
from marlaas.cluster.kubectl import Kubectl
from marlaas.cluster.submission import preview
from marlaas.local.estimates import Estimate, facts, lines, read
from marlaas.local.estimates import estimate as estimate_of
from marlaas.manifest import Finding, InvalidManifest, LoadedManifest, load
from marlaas.manifest.references import anchored_job, anchored_pool
from marlaas_api.documents import job_document, pool_spec
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import Kind, ModelPool, RLJob
from marlaas_api.numeric import QUANTITY, quantity

Files = Annotated[list[str], typer.Argument(metavar="FILE", help="YAML manifests; - is standard input.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Memory = Annotated[bool, typer.Option("--memory", help="Also print the plan of each pool's memory, part by part.")]
Estimated = Annotated[
    bool,
    typer.Option(
        "--estimate",
        help="Also print what each job takes, from earlier runs on this machine; with --server, from ended jobs of the cluster.",
    ),
]
Card = Annotated[
    str | None,
    typer.Option("--card", metavar="SIZE", help="Memory of a GPU, for example 80Gi: refuse pools that do not fit one."),
]
Server = Annotated[bool, typer.Option("--server", help="Also check on the cluster's API server, by a dry run.")]


def validate(
    files: Files,
    as_json: Json = False,
    memory: Memory = False,
    estimate: Estimated = False,
    card: Card = None,
    server: Server = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Check manifests, and report errors by file, line and field.

    Checks everything that needs no cluster, and starts nothing: fields, types and bounds, whether jobs fit their pools, whether environments
    exist and accept their arguments, and the models on this machine. A pool that is not in the files is assumed to be in the cluster. With --server,
    the cluster's API server checks them too, in a dry run: its own rules, fields of existing jobs that must not change, and your permissions.

    With --memory, the memory of each pool whose model is on this machine is printed: of pools with `gpus`, or with --card, on GPUs; of others
    on CPUs, beside the `memory` of their workers.

    With --estimate, tokens, time, and the time of engine and trainer are printed for each job whose pool is in the files. They come from the
    jobs that `marlaas run` has finished on this machine; without one like it, the tokens are an upper bound and the time is not known.
    With --server, they come from the jobs that have succeeded on the cluster's pools, as far as you may list them.

    Notes on standard error report valid settings with a side effect, and problems that would prevent `marlaas run` on this machine.

    Exit code: 0 valid, 1 the cluster of --server cannot be reached, 2 the input must be changed.
    """
    if not server and (context or namespace or kubeconfig):
        raise InvalidInput("--context, --namespace and --kubeconfig need --server")
    kubectl = gateway(context, namespace, kubeconfig) if server else None
    try:
        manifest = load(files, runnable=False, card=_card(card))
        if kubectl is not None:
            preview(kubectl, manifest.placed)
    except InvalidManifest as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"valid": False, "errors": [_finding(one) for one in error.findings]}, indent=2))
        raise typer.Exit(INVALID) from error
    estimates = _estimates(manifest, kubectl) if estimate else []
    if as_json:
        found = {"estimates": {one.job: facts(one) for one in estimates}} if estimate else {}
        typer.echo(json.dumps(_result(manifest, memory) | found, indent=2))
    else:
        _print_summary(manifest, memory)
        for line in lines(estimates):
            typer.echo(line)


def _card(size: str | None) -> int | None:
    if size is None:
        return None
    if re.fullmatch(QUANTITY, size) is None or quantity(size) < 2**30:
        raise InvalidInput(f"--card {size}: expected the memory of a GPU of at least 1Gi, for example 80Gi")
    return int(quantity(size))


def _print_summary(manifest: LoadedManifest, memory: bool) -> None:
    for note in manifest.notes:
        complain(f"note: {note}")
    for one in _objects(manifest):
        typer.echo(f"{type(one).__name__} {_name(one)}: {summary(one)}")
        if memory and isinstance(one, ModelPool):
            _print_memory(manifest, one.metadata.name)
        elif isinstance(one, ModelPool) and (room := manifest.cache_rooms.get(_name(one))):
            typer.echo(f"  KV cache of an engine: {room}")


def _estimates(manifest: LoadedManifest, kubectl: Kubectl | None) -> list[Estimate]:
    """Return the estimates of the jobs whose pool is in the files or in the cluster. kubectl: None estimates runs on this machine."""
    pools = [(one.object, one.source.folder) for one in manifest.placed if isinstance(one.object, ModelPool)]
    jobs = [(one.object, one.source.folder) for one in manifest.placed if isinstance(one.object, RLJob)]
    if kubectl is not None:
        documents = [job_document(job, manifest.tenants, "", None) for job, _ in jobs]
        return cluster_estimates(kubectl, documents, {pool.metadata.name: pool_spec(pool.spec) for pool, _ in pools})
    specs = {pool.metadata.name: pool_spec(anchored_pool(pool, folder).spec) for pool, folder in pools}
    known = read()
    documents = [job_document(anchored_job(job, folder), manifest.tenants, "", None) for job, folder in jobs]
    placed = [(job, specs.get(job.pool_of(job.spec.policies[0]))) for job in documents]
    return [estimate_of(job, pool, known) for job, pool in placed if pool is not None]


def _print_memory(manifest: LoadedManifest, pool: str) -> None:
    plan = manifest.plans.get(pool)
    if plan is None:
        complain(f"note: the model of ModelPool {pool} is not on this machine, so its memory is not known")
        return
    for line in memory_lines(plan):
        typer.echo(line)
    for role, text in plan.refusals():
        complain(f"note: ModelPool {pool}: spec.{role}.memory: {text}")


def _result(manifest: LoadedManifest, memory: bool) -> dict[str, Any]:
    planned = {"memory": {pool: memory_facts(plan) for pool, plan in manifest.plans.items()}} if memory else {}
    objects = [{"kind": type(one).__name__, "name": _name(one), "summary": summary(one)} for one in _objects(manifest)]
    return {"valid": True, "objects": objects, "notes": [_finding(note) for note in manifest.notes]} | planned


def _objects(manifest: LoadedManifest) -> tuple[Kind, ...]:
    return (*manifest.pools, *manifest.tenants, *manifest.jobs)


def _name(one: Kind) -> str:
    return f"{one.metadata.namespace}/{one.metadata.name}" if isinstance(one, RLJob) else one.metadata.name


def _finding(finding: Finding) -> dict[str, Any]:
    return {"file": finding.file, "line": finding.line, "path": finding.path, "text": finding.text}
