"""Actions that bring owned objects to their desired state, in the order of creation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marlaas_operator.manifests.names import SECRET_HASH
from marlaas_operator.plan import Action, Apply, Delete, Manifest
from marlaas_operator.pod_facts import PodFacts
from marlaas_operator.policies.drift import differs
from marlaas_operator.snapshot import Owned

STUCK_S = 15.0
"""A container that is not created within this many seconds may wait for a Secret that was deleted."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """A Secret, applied just before the workload that mounts it, and the pods of that workload.

    The Secret is never read. An outdated content shows in the workload's annotation; a deleted Secret shows in
    pods that cannot start.
    """

    secret: Manifest
    pods: Sequence[PodFacts]


def towards(
    objects: Sequence[Manifest], owned: Owned, owner_uid: str, mounted: Mounted, now: float
) -> Iterator[Action]:
    """Yield the actions that bring the objects to their desired state.

    The last object is the workload; the Secret is applied before it.
    """
    *before, workload = objects
    for manifest in before:
        yield from _put(manifest, _observed(owned, manifest), owner_uid)
    observed = _observed(owned, workload)
    if _secret_is_due(workload, observed) or is_stuck(mounted.pods, now):
        yield Apply(mounted.secret)
    yield from _put(workload, observed, owner_uid)


def put_right(objects: Iterable[Manifest], owned: Owned, owner_uid: str) -> Iterator[Action]:
    """Yield the actions that bring objects without a Secret to their desired state."""
    for manifest in objects:
        yield from _put(manifest, _observed(owned, manifest), owner_uid)


def is_stuck(pods: Iterable[PodFacts], now: float) -> bool:
    """Return whether a container of any pod is still in `ContainerCreating` `STUCK_S` after the pod's creation."""
    return any(
        not pod.ready
        and not pod.deleting
        and not pod.ended
        and now - pod.created_at >= STUCK_S
        and any(container.waiting == "ContainerCreating" for container in pod.containers)
        for pod in pods
    )


def _put(manifest: Manifest, observed: Mapping[str, Any] | None, owner_uid: str) -> Iterator[Action]:
    """Apply one object if it differs from the desired one.

    An object of an earlier owner of the same name is deleted first: its selector is immutable and its
    controller is another one.
    """
    if observed is not None and _is_foreign(observed, owner_uid):
        meta = observed["metadata"]
        if not meta.get("deletionTimestamp"):
            yield Delete(manifest["kind"], meta.get("namespace", ""), meta["name"], meta["uid"])
    elif differs(manifest, observed):
        yield Apply(manifest)


def _observed(owned: Owned, manifest: Manifest) -> Mapping[str, Any] | None:
    return owned.get((manifest["kind"], manifest["metadata"]["name"]))


def _is_foreign(observed: Mapping[str, Any], owner_uid: str) -> bool:
    owners = observed["metadata"].get("ownerReferences") or ()
    return any(owner.get("controller") and owner.get("uid") != owner_uid for owner in owners)


def _secret_is_due(workload: Manifest, observed: Mapping[str, Any] | None) -> bool:
    meta = observed["metadata"] if observed is not None else {}
    stored = (meta.get("annotations") or {}).get(SECRET_HASH)
    return bool(stored != workload["metadata"]["annotations"][SECRET_HASH])
