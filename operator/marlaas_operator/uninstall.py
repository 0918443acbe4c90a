"""Cleanup that the chart runs before `helm uninstall` deletes the operator.

Usage: `python -m marlaas_operator.uninstall --installation FILE`.

It stops the operator (which would recreate everything), deletes the objects that the operator made, and removes
its finalizers: without an operator they would block the deletion of RLJobs, ModelPools and their namespaces
forever. The RLJobs, ModelPools and Tenants stay, and so does all data; the output, which helm prints, lists
what is kept. A second run after a crash continues the first.
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
from marlaas_operator.cluster.resources import (
    DEPLOYMENTS,
    MANAGED,
    MODELPOOLS,
    OWNED,
    PODS,
    RLJOBS,
    SECRETS,
    STATEFULSETS,
)
from marlaas_operator.installation import Installation, load
from marlaas_operator.object_cache import TENANT_LABEL

_TRIES = 60
_PAUSE_S = 0.5


class StillRunning(MarlaasError):
    """The operator's pod still runs after the timeout."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Clean up, and print the list of kept objects.

    Returns:
        0 when nothing else is left; 1 otherwise, with the reason on stderr.
    """
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
    """Return which data outlives the release, and how to delete it."""
    release, kept = (
        installation.release,
        ["the usage histories of Tenants", "the kinds with every RLJob, ModelPool and Tenant"],
    )
    if installation.nats_pod_selector is not None:
        kept.append(f"the claim data-{release}-nats-0 (progress and records of the jobs)")
    place = installation.blobs.claim_name
    kept.append(f"{f'the claim {place}' if place else installation.blobs.url} (all trained adapters)")
    selector = f"app.kubernetes.io/name=marlaas,app.kubernetes.io/instance={release}"
    return (
        f"Kept: {', '.join(kept)}. A release {release} in {installation.namespace} takes them up again.\n"
        f"To delete the claims that the release made, for good: kubectl --namespace {installation.namespace} delete persistentvolumeclaims "
        f"--selector {selector}\n"
    )


class LeftBehind(MarlaasError):
    """An object could not be deleted, or a finalizer not removed; the text lists them."""


async def _run(installation: Installation, kubeconfig: Path | None) -> None:
    cluster = await connect(kubeconfig)
    try:
        await clean_up(cluster, installation)
    finally:
        await cluster.close()


async def clean_up(cluster: Cluster, installation: Installation) -> None:
    """Stop the operator, delete the objects that it made and remove its finalizers.

    RLJobs, ModelPools and Tenants stay.

    Raises:
        StillRunning: the operator's pod does not end.
        LeftBehind: a finalizer could not be removed (raised at once), or deletions were refused (raised last).
        MarlaasError: any error of the cluster.
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
    # The scale subresource, because the operator's RBAC rights do not cover the chart's own Deployments.
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
    raise StillRunning(f"the pod of {name} still runs {_TRIES * _PAUSE_S:.0f} s after its Deployment was scaled to 0")


async def _delete_owned(cluster: Cluster, release: str) -> list[str]:
    """Delete workloads first (their pods and Secrets with them), then the other objects; keep the Tenants' usage histories.

    Returns:
        The texts of refused deletions.
    """
    refused = []
    for resource in OWNED:
        if resource == PODS:
            continue
        for body in await cluster.list(resource, labels=f"{MANAGED},app.kubernetes.io/instance={release}"):
            target = target_of(body)
            if TENANT_LABEL in body["metadata"]["labels"]:
                continue
            if resource in (DEPLOYMENTS, STATEFULSETS):
                await _delete_secret(cluster, target)
            try:
                await cluster.delete(target)
            except (Forbidden, Invalid) as error:
                refused.append(str(error))
    return refused


async def _delete_secret(cluster: Cluster, workload: Target) -> None:
    """Delete the Secret of a workload, which has the workload's name.

    Secrets can be neither listed nor read. A refused deletion means that the Secret is not ours.
    """
    try:
        await cluster.delete(Target(SECRETS, workload.namespace, workload.name))
    except (Forbidden, Invalid):  # Invalid: refused by an admission policy
        return


async def _release(cluster: Cluster, target: Target) -> None:
    """Remove our finalizers; retry when the object changes meanwhile.

    Raises:
        LeftBehind: every try met a concurrent change.
    """
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
    raise LeftBehind(f"{target} changed {_TRIES} times while its finalizer was being removed; run the cleanup again")


def _without_ours(body: Body) -> Body | None:
    metadata = body["metadata"]
    finalizers = metadata.get("finalizers", [])
    kept = [name for name in finalizers if not str(name).startswith(f"{GROUP}/")]
    if kept == finalizers:
        return None
    return {"metadata": {"finalizers": kept, "resourceVersion": metadata["resourceVersion"]}}


if __name__ == "__main__":
    sys.exit(main())
