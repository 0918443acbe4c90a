"""`kubectl marlaas eval`: evaluate a manifest's jobs on a cluster without training them."""

from collections.abc import Sequence
from typing import Annotated

import typer

from marlaas.cli.app import FAILED, complain
from marlaas.cli.cluster import Files, JobLister, watch_jobs, within
from marlaas.cli.cluster_options import Context, Kubeconfig, Namespace, gateway
from marlaas.cluster.evaluating import only_evaluating, results
from marlaas.cluster.submission import submit
from marlaas.cluster.views import job_view
from marlaas.manifest import load
from marlaas.manifest.findings import Placed
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import RLJob

Adapter = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="[AGENT=]PATH",
        help="PEFT adapter to evaluate, as a path that the pool's workers can read; of this agent if the job has several; may be repeated. "
        "[default: that of initFrom.path, else the base model]",
    ),
]
Suffix = Annotated[str, typer.Option(metavar="WORD", help="The evaluated job is called NAME-WORD.")]
Wait = Annotated[bool, typer.Option(help="Watch the jobs until they end, and print their results.")]


def evaluate(
    files: Files,
    adapter: Adapter = None,
    suffix: Suffix = "eval",
    wait: Wait = True,
    context: Context = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Evaluate the jobs of manifests on a cluster, without training.

    Applies each RLJob as NAME-eval with 0 steps and without exports; its pool must exist. It plays the held-out tasks of the job's evaluation,
    or of its suites, with the base model or with the adapters of --adapter. The same command again shows the results of a job that has ended;
    to evaluate anew, delete it, or choose another --suffix.

    Exit code: 0 evaluated, 1 a job failed or the cluster cannot be reached, 2 the input must be changed first, 130 stopped by Ctrl-C.
    """
    kubectl = gateway(context, namespace, kubeconfig)
    manifest = load(files, runnable=False)
    jobs = [Placed(one.object, one.source) for one in manifest.placed if isinstance(one.object, RLJob)]
    if not jobs:
        raise InvalidInput(f"no RLJob to evaluate in {', '.join(files)}")
    adapters = dict(_named(text) for text in adapter or ())
    applied = submit(kubectl, [only_evaluating(job, adapters, suffix) for job in jobs])
    places: dict[str, list[str]] = {}
    for one in applied:
        typer.echo(f"{one}; evaluation only")
        places.setdefault(one.namespace, []).append(one.name)
    if not wait:
        return
    looks = [JobLister(within(kubectl, there), names) for there, names in places.items()]
    try:
        watch_jobs(looks, as_json=False)
    except typer.Exit as end:
        if end.exit_code == FAILED:
            _print(looks)
        raise
    _print(looks)


def _print(looks: Sequence[JobLister]) -> None:
    """Print the results of the jobs that have succeeded."""
    for body in (body for look in looks for body in look()):
        lines = list(results(job_view(body)))
        for line in lines:
            typer.echo(line)
        if not lines:
            complain(f"{body['metadata']['name']} has no results")


def _named(text: str) -> tuple[str, str]:
    agent, equals, path = text.partition("=")
    return (agent, path) if equals and "/" not in agent else ("", text)
