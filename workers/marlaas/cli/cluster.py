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
from marlaas.cli.cluster_options import Context, Everywhere, Kubeconfig, Namespace, gateway
from marlaas.cli.run_state import why_in_run
from marlaas.cli.running import cancel_in_run, submit_to_run, suspend_in_run
from marlaas.cli.summaries import summary
from marlaas.cluster.errors import ObjectMissing
from marlaas.cluster.explain import ClusterContext, explain
from marlaas.cluster.fetching import fetch, published
from marlaas.cluster.kubectl import Kubectl
from marlaas.cluster.submission import submit as submit_objects
from marlaas.cluster.views import RLJOBS, events_of, job_view, jobs_beside, pools_of
from marlaas.cluster.watching import PERIOD_S, ClusterWatch
from marlaas.local.display import LiveDisplay, choose, failures, table
from marlaas.manifest import load
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.fields import did_you_mean

Run = Annotated[
    Path | None, typer.Option("--run", metavar="DIR", help="Output folder of a `marlaas run`, instead of a cluster.")
]

Files = Annotated[list[str], typer.Argument(metavar="FILE…", help="YAML manifests; - is standard input.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the RLJob.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="Names of RLJobs. [default: all]")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line instead of the table.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write to; adapters in it are replaced.")]
Agent = Annotated[str | None, typer.Option("--agent", metavar="NAME", help="Agent to fetch. [default: all agents]")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Watch the submitted jobs until they end.")]
JobsOnly = Annotated[bool, typer.Option("--jobs-only", help="Submit only the RLJobs of the files.")]


def submit(
    files: Files,
    watch: Watch = False,
    jobs_only: JobsOnly = False,
    run: Run = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Check manifests, here and on the API server, then apply them to the cluster; or, with --run, to a run on this machine.

    Takes the same files as `marlaas run`. If the API server rejects an object, nothing is applied, and the errors are reported by file, line and field.
    With --run DIR, the files' jobs are added to the run, or replace its jobs of the same name; their pools must be part of the run.

    Exit code: 0 applied (with --watch: and no job failed), 1 a job failed or the cluster cannot be reached, 2 the input must be changed first.
    """
    if run is not None:
        if watch or jobs_only or context or namespace or kubeconfig:
            raise InvalidInput("--run excludes --watch, --jobs-only, --context, --namespace and --kubeconfig")
        submit_to_run(run, files)
        return
    kubectl = gateway(context, namespace, kubeconfig)
    manifest = load(files, runnable=False)
    placed = [one for one in manifest.placed if not jobs_only or isinstance(one.object, RLJob)]
    if not placed:
        raise InvalidInput(f"no objects to submit in {', '.join(files)}")
    jobs: dict[str, list[str]] = {}
    for one, applied in zip(placed, submit_objects(kubectl, placed), strict=True):
        typer.echo(f"{applied}; {summary(one.object)}")
        if applied.kind == "RLJob":
            jobs.setdefault(applied.namespace, []).append(applied.name)
    for note in manifest.cluster_notes:
        complain(f"note: {note}")
    if watch and jobs:
        watch_jobs([JobLister(within(kubectl, there), names) for there, names in jobs.items()], as_json=False)
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
    """Show the status of jobs in the cluster until all of them have ended, in the live table of `marlaas run`.

    If the output is not a terminal, print a line for each change of phase. Ctrl-C ends the display, not the jobs.

    Exit code: 0 no watched job failed, 1 a job failed or does not exist, or the cluster cannot be reached, 2 the options exclude each other, 130 stopped
    by Ctrl-C.
    """
    kubectl = gateway(context, namespace, kubeconfig)
    if everywhere and names:
        raise InvalidInput("give names or -A, not both: a name belongs to one namespace")
    look: _ListJobs = (
        partial(kubectl.list, RLJOBS, "--all-namespaces") if everywhere else JobLister(kubectl, names or ())
    )
    if not watch_jobs([look], as_json):
        here = f"in namespace {kubectl.namespace()}; choose another one with -n NAMESPACE, or all with -A"
        complain(f"no RLJobs {'in the cluster' if everywhere else here}")


def suspend(
    name: Name,
    run: Run = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Suspend a job and free its resources; `resume` continues with the interrupted step.

    Exit code: 0 the job will stop, or is suspended already, 1 the job does not exist or the cluster cannot be reached, 2 the job has ended, or the run has no such job.
    """
    if run is not None:
        suspend_in_run(run, name, namespace, True)
    else:
        _set_suspend(gateway(context, namespace, kubeconfig), name, True)


def resume(
    name: Name,
    run: Run = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Continue a suspended job from its last committed step.

    Exit code: 0 the job continues once it is admitted, or was not suspended, 1 the job does not exist or the cluster cannot be reached, 2 the job has ended, or the run has no such job.
    """
    if run is not None:
        suspend_in_run(run, name, namespace, False)
    else:
        _set_suspend(gateway(context, namespace, kubeconfig), name, False)


def cancel(
    name: Name,
    run: Annotated[Path, typer.Option("--run", metavar="DIR", help="Output folder of a `marlaas run` that goes on.")],
    namespace: Namespace = None,
) -> None:
    """Cancel a job of a run on this machine: it stops at once and leaves the run; its files stay.

    In a cluster, delete the object: `kubectl delete rljob NAME`.

    Exit code: 0 cancelled, 2 the job is not part of the run or has ended, or no run uses the folder.
    """
    cancel_in_run(run, name, namespace)


def why(
    name: Name,
    run: Run = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Explain in one paragraph what a job does or waits for, since when, and what to do.

    With --run DIR, a job of a run on this machine: while the run goes on, or as it was left.

    Exit code: 0 success, 1 the job does not exist or the cluster cannot be reached, 2 the run has no such job.
    """
    if run is not None:
        if context or kubeconfig:
            raise InvalidInput("--run excludes --context and --kubeconfig")
        typer.echo(why_in_run(run, name, namespace))
        return
    kubectl = gateway(context, namespace, kubeconfig)
    job = job_view(_job(kubectl, name))
    around = ClusterContext(pools_of(kubectl, job), events_of(kubectl, job), jobs_beside(kubectl, job))
    typer.echo(explain(job, around, time.time()))


def adapter(
    name: Name,
    out: Out,
    agent: Agent = None,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Fetch a job's published adapter as a PEFT folder: the promoted version of a succeeded job, else the newest version.

    Of a job with several agents, it fetches one to each subfolder `<agent>/`, as `marlaas run` does; with --agent, one to DIR itself.
    Runs a command in the orchestrator's pod, which needs permission for `kubectl exec` there. Without it, the error names the adapter's place in the blob store.

    Exit code: 0 written, 1 the job does not exist or the adapter cannot be fetched, 2 there is no adapter yet, or the folder holds other files.
    """
    kubectl = gateway(context, namespace, kubeconfig)
    job = job_view(_job(kubectl, name))
    wanted = published(job, agent)
    for one, folder in zip(wanted, fetch(kubectl, job, wanted, out), strict=True):
        typer.echo(f"{folder}: version {one.version} of agent {one.agent} of {job.key}")
    if agent is None and (lacking := job.policies.keys() - {one.agent for one in wanted}):
        complain(f"note: no version yet of {', '.join(sorted(lacking))}")


def _set_suspend(kubectl: Kubectl, name: str, wanted: bool) -> None:
    body = _job(kubectl, name)
    view = job_view(body)
    phase = view.status.phase if view.status is not None else None
    if phase in ("Succeeded", "Failed"):
        raise InvalidInput(
            f"{view.key} has {phase.lower()}: a finished job cannot be {'suspended' if wanted else 'resumed'}"
        )
    if bool(body["spec"].get("suspend", False)) is wanted:
        typer.echo(f"{view.key}: spec.suspend is already {str(wanted).lower()}")
        return
    kubectl.patch(RLJOBS, name, {"spec": {"suspend": wanted}})
    effect = (
        "suspended: the job stops and frees its resources"
        if wanted
        else "resumed: the job continues once it is admitted"
    )
    other = "resume" if wanted else "why"
    typer.echo(f"{view.key}: {effect}; kubectl marlaas {other} {name} -n {view.namespace}")


def _job(kubectl: Kubectl, name: str) -> dict[str, Any]:
    """Return the job. Raises ObjectMissing, with similar names as a hint."""
    try:
        return kubectl.get(RLJOBS, name)
    except ObjectMissing:
        raise _unknown(kubectl, name, [body["metadata"]["name"] for body in kubectl.list(RLJOBS)]) from None


def _unknown(kubectl: Kubectl, name: str, names: Sequence[str]) -> ObjectMissing:
    there = kubectl.namespace()
    hint = (
        did_you_mean(name, names)
        or "; choose another namespace with -n NAMESPACE, or list all jobs with `marlaas watch -A`"
    )
    return ObjectMissing(f"RLJob '{name}' does not exist in namespace {there}{hint}")


_ListJobs = Callable[[], Sequence[Mapping[str, Any]]]


@dataclass(slots=True)
class JobLister:
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


def within(kubectl: Kubectl, namespace: str) -> Kubectl:
    """Return the client for another namespace."""
    return replace(kubectl, target=replace(kubectl.target, namespace=namespace))


def watch_jobs(looks: Sequence[_ListJobs], as_json: bool) -> bool:
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
        views = [*watching.views.values()]
        console = Console()
        most_rows = sum(2 + len(one.document.spec.agents) for one in views)
        console.print(table(views, most_rows, console.width), *failures(views), sep="\n")
    if watching.failed:
        raise typer.Exit(FAILED)
    return bool(watching.views or watching.noted)
