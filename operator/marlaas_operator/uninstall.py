"""`python -m marlaas_operator.uninstall --installation FILE`: what the chart runs before `helm uninstall` takes the operator away.

Stops the operator (it would make everything anew), deletes what it made, and takes its finalizers off: without an operator they would
hold RLJobs, ModelPools and their namespaces for ever. The objects themselves stay, and so does all data: what is kept is said at the end (helm prints it).
Run again after a crash, it goes on where it was.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from marlaas_api.errors import MarlaasError
from marlaas_api.kinds import GROUP
from marlaas_operator.cluster import Body, Cluster, Conflict, Forbidden, Invalid, NotFound, Target, target_of
from marlaas_operator.cluster.api_server import connect
from marlaas_operator.cluster.resources import DEPLOYMENTS, MODELPOOLS, OWNED, PODS, RLJOBS, SECRETS, STATEFULSETS
from marlaas_operator.installation import Installation, load

_MADE_BY_AN_OPERATOR = "app.kubernetes.io/managed-by=marlaas-operator"
_TRIES = 60
_PAUSE_S = 0.5


class StillRunning(MarlaasError):
    """The operator's pod does not end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Clean up and say what is kept; 0 when nothing else is left, 1 with the reason on stderr otherwise."""
    parser = argparse.ArgumentParser(prog="python -m marlaas_operator.uninstall")
    parser.add_argument("--installation", required=True, type=Path, metavar="FILE", help="the operator's own file")
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="outside a cluster")
    options = parser.parse_args(arguments)
    try:
        installation = load(options.installation)
        asyncio.run(_run(installation, options.kubeconfig))
    except MarlaasError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(kept_text(installation))
    return 0


def kept_text(installation: Installation) -> str:
    """Which data outlives the release, and how to delete it."""
    release, kept = installation.release, ["the kinds with every RLJob, ModelPool and Tenant"]
    if installation.nats_pod_selector is not None:
        kept.append(f"the claim data-{release}-nats-0 (what the jobs have done so far)")
    place = installation.blobs.claim_name
    kept.append(f"{f'the claim {place}' if place else installation.blobs.url} (every trained adapter)")
    selector = f"app.kubernetes.io/name=marlaas,app.kubernetes.io/instance={release}"
    return (
        f"Kept: {', '.join(kept)}. A release {release} in {installation.namespace} takes them up again.\n"
        f"To delete the claims that the release made, for good: kubectl --namespace {installation.namespace} delete persistentvolumeclaims "
        f"--selector {selector}\n"
    )


class LeftBehind(MarlaasError):
    """The API server does not let some of what the operator made be deleted, or a finalizer be taken off; the text says what."""


async def _run(installation: Installation, kubeconfig: Path | None) -> None:
    cluster = await connect(kubeconfig)
    try:
        await clean_up(cluster, installation)
    finally:
        await cluster.close()


async def clean_up(cluster: Cluster, installation: Installation) -> None:
    """Leave nothing of the operator but the kinds' objects.

    Raises StillRunning; LeftBehind once everything else is done; and what the cluster raises.
    """
    await _stop_operator(cluster, installation)
    refused = await _delete_owned(cluster, installation.release)
    for resource in (RLJOBS, MODELPOOLS):
        for body in await cluster.list(resource):
            await _release(cluster, target_of(body))
    if refused:
        raise LeftBehind("; ".join(refused))


async def _stop_operator(cluster: Cluster, installation: Installation) -> None:
    name = f"{installation.release}-operator"
    # The subresource, because the Deployment is the chart's: what the operator did not make, its rights do not reach.
    scale = Target(DEPLOYMENTS, installation.namespace, f"{name}/scale")
    try:
        await cluster.patch(scale, {"spec": {"replicas": 0}})
    except NotFound:
        return
    labels = f"app.kubernetes.io/component=operator,app.kubernetes.io/instance={installation.release}"
    for _ in range(_TRIES):
        if not await cluster.list(PODS, namespace=installation.namespace, labels=labels):
            return
        await asyncio.sleep(_PAUSE_S)
    raise StillRunning(f"the pod of {name} still runs {_TRIES * _PAUSE_S:.0f} s after it was told to end")


async def _delete_owned(cluster: Cluster, release: str) -> list[str]:
    """Workloads first (their pods and Secrets with them), then what stood around them; the sentences of what was refused come back."""
    refused = []
    for resource in OWNED:
        if resource == PODS:
            continue
        for body in await cluster.list(resource, labels=f"{_MADE_BY_AN_OPERATOR},app.kubernetes.io/instance={release}"):
            target = target_of(body)
            if resource in (DEPLOYMENTS, STATEFULSETS):
                await _delete_secret(cluster, target)
            try:
                await cluster.delete(target)
            except (Forbidden, Invalid) as error:
                refused.append(str(error))
    return refused


async def _delete_secret(cluster: Cluster, workload: Target) -> None:
    """A workload's credential has its name. Secrets can be neither listed nor read, and a foreign one of that name is not ours to delete."""
    try:
        await cluster.delete(Target(SECRETS, workload.namespace, workload.name))
    except (Forbidden, Invalid):  # an admission policy says the latter
        return


async def _release(cluster: Cluster, target: Target) -> None:
    """Take our finalizers off; whoever changes the object meanwhile makes us look again. Raises LeftBehind: it never stood still."""
    for _ in range(_TRIES):
        try:
            body = await cluster.get(target)
            if patch := _without_ours(body):
                await cluster.patch(target, patch)
            return
        except Conflict:
            continue
        except NotFound:
            return
    raise LeftBehind(f"{target} changed {_TRIES} times while its finalizer was to be taken off, and still has it")


def _without_ours(body: Body) -> Body | None:
    metadata = body["metadata"]
    finalizers = metadata.get("finalizers", [])
    kept = [name for name in finalizers if not str(name).startswith(f"{GROUP}/")]
    if kept == finalizers:
        return None
    return {"metadata": {"finalizers": kept, "resourceVersion": metadata["resourceVersion"]}}


if __name__ == "__main__":
    sys.exit(main())
