"""Commands that work on a cluster: submit, watch, suspend, resume, why, adapter. `kubectl marlaas` offers the same commands."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from marlaas.cli.app import FAILED, INTERRUPTED, complain
from marlaas.cli.summaries import summary
from marlaas.cluster.errors import AccessDenied, ObjectMissing
from marlaas.cluster.explain import explain
from marlaas.cluster.fetching import fetch, published
from marlaas.cluster.kubectl import ClusterTarget, Kubectl
from marlaas.cluster.submission import submit as submit_objects
from marlaas.cluster.views import ClusterEventView, ClusterJobView, ClusterPoolView, event_view, job_view, pool_view
from marlaas.cluster.watching import PERIOD_S, ClusterWatch
from marlaas.local.display import LiveDisplay, choose, failures, table
from marlaas.manifest import load
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.fields import did_you_mean

Context = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig; its current one.")
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace; the context's own when absent.")
]
Kubeconfig = Annotated[
    str | None, typer.Option("--kubeconfig", metavar="FILE", help="Kubeconfig; kubectl's own choice.")
]


def gateway(context: str | None, namespace: str | None, kubeconfig: str | None) -> Kubectl:
    """Return the kubectl client for the cluster that the options select."""
    return Kubectl(ClusterTarget(context, namespace, kubeconfig))


RLJOBS, MODELPOOLS = "rljobs.marlaas.dev", "modelpools.marlaas.dev"

Files = Annotated[list[str], typer.Argument(metavar="FILE…", help="Manifests in YAML; - reads standard input.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the RLJob.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Names of RLJobs; all when absent.")]
Everywhere = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of every namespace.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line, for machines, instead of the table.")]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder to write; an adapter that is there is replaced.")
]
Agent = Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Agent of a job with several; the first.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Then watch the submitted jobs until they end.")]
JobsOnly = Annotated[bool, typer.Option("--jobs-only", help="Leave ModelPools and Tenants of the files alone.")]


def submit(
    files: Files,
    watch: Watch = False,
    jobs_only: JobsOnly = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Check manifests, here and on the API server, then apply them to the cluster.

    The very files that `marlaas run` takes. Nothing is applied unless everything would be: what is wrong is told by file, line and field.

    Exit code: 0 applied (with --watch: and no job failed), 1 it failed, or the cluster could not be asked, 2 something must be changed first.
    """
    kubectl = gateway(context, namespace, kubeconfig)
    manifest = load(files, runnable=False)
    placed = [one for one in manifest.placed if not jobs_only or isinstance(one.object, RLJob)]
    if not placed:
        raise InvalidInput(f"nothing to submit in {', '.join(files)}")
    jobs: dict[str, list[str]] = {}
    for one, applied in zip(placed, submit_objects(kubectl, placed), strict=True):
        typer.echo(f"{applied}; {summary(one.object)}")
        if applied.kind == "RLJob":
            jobs.setdefault(applied.namespace, []).append(applied.name)
    for note in manifest.cluster_notes:
        complain(f"note: {note}")
    if watch and jobs:
        _watch([_Looker(_within(kubectl, there), names) for there, names in jobs.items()], as_json=False)
    for there, names in jobs.items():
        typer.echo(f"watch: kubectl marlaas watch -n {there} {' '.join(names)}")


def watch(
    names: Names = None,
    everywhere: Everywhere = False,
    as_json: Json = False,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show how jobs in the cluster stand, until all of them have ended: the live table of `marlaas run`.

    Where the output is no terminal, a line for every change of phase. Ctrl-C ends the watching, not the jobs.

    Exit code: 0 no watched job failed, 1 one did, or is not there, or the cluster could not be asked, 2 the options do not go together, 130 stopped
    by Ctrl-C.
    """
    kubectl = gateway(context, namespace, kubeconfig)
    if everywhere and names:
        raise InvalidInput("give names or -A, not both: a name belongs to one namespace")
    look: _Look = partial(kubectl.list, RLJOBS, "--all-namespaces") if everywhere else _Looker(kubectl, names or ())
    if not _watch([look], as_json):
        here = f"in namespace {kubectl.namespace()}; -n NAMESPACE looks elsewhere, -A everywhere"
        complain(f"no RLJobs {'in the cluster' if everywhere else here}")


def suspend(name: Name, context: Context = None, namespace: Namespace = None, kubeconfig: Kubeconfig = None) -> None:
    """Stop a job and free what it holds; `resume` goes on with the step that was under way.

    Exit code: 0 it will stop, or has been told so before, 1 no such job, or the cluster could not be asked, 2 the job has ended.
    """
    _set_suspend(gateway(context, namespace, kubeconfig), name, True)


def resume(name: Name, context: Context = None, namespace: Namespace = None, kubeconfig: Kubeconfig = None) -> None:
    """Let a suspended job go on from its last committed step.

    Exit code: 0 it goes on once it is admitted, or was never suspended, 1 no such job, or the cluster could not be asked, 2 the job has ended.
    """
    _set_suspend(gateway(context, namespace, kubeconfig), name, False)


def why(name: Name, context: Context = None, namespace: Namespace = None, kubeconfig: Kubeconfig = None) -> None:
    """Tell in one paragraph what a job is doing or waiting for, since when, and what to do.

    Exit code: 0 told, 1 no such job, or the cluster could not be asked.
    """
    kubectl = gateway(context, namespace, kubeconfig)
    job = job_view(_job(kubectl, name))
    typer.echo(explain(job, _pool(kubectl, job), _events(kubectl, job), time.time()))


def adapter(
    name: Name,
    out: Out,
    agent: Agent = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Fetch a job's published adapter as a plain PEFT folder: the promoted version of a succeeded job, the newest of another.

    Asks the orchestrator's pod for it, so it is for who may `kubectl exec` there; others are told where in the blob store it lies.

    Exit code: 0 written, 1 no such job, or it could not be fetched, 2 there is no adapter yet, or the folder holds something else.
    """
    kubectl = gateway(context, namespace, kubeconfig)
    job = job_view(_job(kubectl, name))
    wanted = published(job, agent)
    fetch(kubectl, job, wanted, out)
    typer.echo(f"{out}: version {wanted.version} of agent {wanted.agent} of {job.key}")


def _set_suspend(kubectl: Kubectl, name: str, wanted: bool) -> None:
    body = _job(kubectl, name)
    sight = job_view(body)
    phase = sight.status.phase if sight.status is not None else None
    if phase in ("Succeeded", "Failed"):
        raise InvalidInput(f"{sight.key} has {phase.lower()}: there is nothing to {'suspend' if wanted else 'resume'}")
    if bool(body["spec"].get("suspend", False)) is wanted:
        typer.echo(f"{sight.key}: spec.suspend is {str(wanted).lower()} already")
        return
    kubectl.patch(RLJOBS, name, {"spec": {"suspend": wanted}})
    said = "suspended: it stops and frees what it holds" if wanted else "goes on as soon as it is admitted"
    other = "resume" if wanted else "why"
    typer.echo(f"{sight.key}: {said}; kubectl marlaas {other} {name} -n {sight.namespace}")


def _job(kubectl: Kubectl, name: str) -> dict[str, Any]:
    """Return the job. Raises ObjectMissing, with similar names as a hint."""
    try:
        return kubectl.get(RLJOBS, name)
    except ObjectMissing:
        raise _unknown(kubectl, name, [body["metadata"]["name"] for body in kubectl.list(RLJOBS)]) from None


def _unknown(kubectl: Kubectl, name: str, names: Sequence[str]) -> ObjectMissing:
    there = kubectl.namespace()
    hint = did_you_mean(name, names) or "; -n NAMESPACE looks elsewhere, `marlaas watch -A` everywhere"
    return ObjectMissing(f"there is no RLJob '{name}' in namespace {there}{hint}")


def _pool(kubectl: Kubectl, job: ClusterJobView) -> ClusterPoolView | None:
    """Return the job's pool; None if it is missing or the user may not read it."""
    try:
        return pool_view(kubectl.get(MODELPOOLS, job.pool))
    except (ObjectMissing, AccessDenied):
        return None


def _events(kubectl: Kubectl, job: ClusterJobView) -> list[ClusterEventView]:
    try:
        found = kubectl.list("events", f"--field-selector=involvedObject.uid={job.uid}")
    except AccessDenied:
        return []
    return [event_view(body) for body in found]


_Look = Callable[[], Sequence[Mapping[str, Any]]]


@dataclass(slots=True)
class _Looker:
    """Lists the jobs of one namespace. The first call raises ObjectMissing if one of the names does not exist."""

    kubectl: Kubectl
    names: Sequence[str]
    is_first: bool = True

    def __call__(self) -> list[dict[str, Any]]:
        found = self.kubectl.list(RLJOBS)
        there = [body["metadata"]["name"] for body in found]
        missing = [name for name in self.names if name not in there]
        if self.is_first and missing:
            raise _unknown(self.kubectl, missing[0], there)
        self.is_first = False
        return [body for body in found if not self.names or body["metadata"]["name"] in self.names]


def _within(kubectl: Kubectl, namespace: str) -> Kubectl:
    return replace(kubectl, target=replace(kubectl.target, namespace=namespace))


def _watch(looks: Sequence[_Look], as_json: bool) -> bool:
    """Show jobs until they end. Return whether there were any. Raises Exit when one failed."""
    display = choose(as_json)
    watching = ClusterWatch(lambda: [body for look in looks for body in look()], display, time.time)
    try:
        watching.run(lambda: time.sleep(PERIOD_S))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    finally:
        display.close()
    if watching.views and isinstance(display, LiveDisplay):
        Console().print(table([*watching.views.values()]), *failures([*watching.views.values()]), sep="\n")
    if watching.failed:
        raise typer.Exit(FAILED)
    return bool(watching.views or watching.told)
