"""Keeping owned objects as they are wanted: what is to be applied, in the order of creation, and what stands in the way."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marlaas_operator.manifests.names import SECRET_HASH
from marlaas_operator.plan import Action, Apply, Delete, Manifest
from marlaas_operator.pod_facts import PodFacts
from marlaas_operator.policies.drift import differs
from marlaas_operator.snapshot import Owned

STUCK_S = 15.0
"""A container that is not even created after this long may wait for a Secret that somebody has deleted."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """A Secret, applied just before the workload that mounts it, and the pods of that workload.

    It is never read: that it holds what it should is seen by the workload's annotation, that it is gone by pods that cannot begin.
    """

    secret: Manifest
    pods: Sequence[PodFacts]


def towards(
    objects: Sequence[Manifest], owned: Owned, owner_uid: str, mounted: Mounted, now: float
) -> Iterator[Action]:
    """Actions that make the objects as they should be; the last object is the workload, and the Secret goes before it."""
    *before, workload = objects
    for manifest in before:
        yield from _put(manifest, _observed(owned, manifest), owner_uid)
    observed = _observed(owned, workload)
    if _secret_is_due(workload, observed) or is_stuck(mounted.pods, now):
        yield Apply(mounted.secret)
    yield from _put(workload, observed, owner_uid)


def put_right(objects: Iterable[Manifest], owned: Owned, owner_uid: str) -> Iterator[Action]:
    """Actions that make objects without a Secret as they should be."""
    for manifest in objects:
        yield from _put(manifest, _observed(owned, manifest), owner_uid)


def is_stuck(pods: Iterable[PodFacts], now: float) -> bool:
    """Whether a pod has a node and cannot begin."""
    return any(
        not pod.ready
        and not pod.deleting
        and not pod.ended
        and now - pod.created_at >= STUCK_S
        and any(container.waiting == "ContainerCreating" for container in pod.containers)
        for pod in pods
    )


def _put(manifest: Manifest, observed: Mapping[str, Any] | None, owner_uid: str) -> Iterator[Action]:
    """Apply one object if it is not as it should be. One that an earlier owner of the same name has left cannot be taken over
    (a selector is fixed, and there is one controller): it goes first."""
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
