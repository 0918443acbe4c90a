"""Reconciliation of owned objects: whether one differs from its desired state, and the actions that create, repair and delete.

Comparison (`differs`) looks only at fields that we set. Others may add labels, annotations, containers, environment variables and
fields. Lists that Kubernetes merges by key are compared by that key, all others as a whole; quantities are compared by value.

A sandbox's objects are created in the order ServiceAccount, NetworkPolicy, Secret, Deployment, so that tenant code never runs
unprotected. Deletion takes the Deployment first and the rest once no pod is left. The ServiceAccount goes last: while it exists, a Secret,
which the operator cannot read, may exist too.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marlaas_api.messages import JobDocument
from marlaas_api.numeric import quantity
from marlaas_operator.installation import Installation
from marlaas_operator.manifests.pods import DESIRED_HASH, SECRET_HASH, sandbox_name
from marlaas_operator.manifests.sandbox import Sandbox, sandbox_objects, sandbox_secret
from marlaas_operator.plan import Action, Apply, Delete, Manifest
from marlaas_operator.pod_facts import PodFacts
from marlaas_operator.snapshot import JobSnapshot, Owned


def plan_sandbox(
    snapshot: JobSnapshot, wanted: JobDocument | None, installation: Installation, now: float
) -> tuple[Action, ...]:
    """Return the actions that create and update the sandbox of an admitted job."""
    document = wanted or snapshot.own_document  # for a job that no longer parses: the published document
    if document is None or snapshot.credential is None:
        return ()
    if snapshot.own_pool is None:  # pool deleted by force, or invalid: its sandbox bounds are unknown, not absent
        return ()
    sandbox = Sandbox(snapshot.meta, document, snapshot.own_pool.spec.sandbox, snapshot.credential)
    objects = sandbox_objects(sandbox, installation)
    secret = Mounted(sandbox_secret(sandbox, installation), snapshot.pods)
    return tuple(towards(objects, snapshot.owned, snapshot.meta.uid, secret, now))


def removal(snapshot: JobSnapshot) -> Iterator[Action]:
    """Yield the actions that delete the sandbox."""
    return removed(snapshot, sandbox_name(snapshot.meta.name), snapshot.pods)


def removed(snapshot: JobSnapshot, name: str, pods: Sequence[PodFacts]) -> Iterator[Action]:
    """Yield the actions that delete the objects of a name in the job's namespace: the Deployment, and the others after its last pod."""
    if not any(own == name for _, own in snapshot.owned):
        return
    deployment = snapshot.owned.get(("Deployment", name))
    if deployment is not None:
        yield from delete("Deployment", deployment)
    elif not pods:
        yield Delete("Secret", snapshot.meta.namespace, name)
        for kind in ("NetworkPolicy", "ServiceAccount"):
            yield from delete(kind, snapshot.owned.get((kind, name)))


def delete(kind: str, observed: Mapping[str, Any] | None) -> Iterator[Action]:
    """Yield the deletion of an object, unless it is absent or already being deleted."""
    meta = observed["metadata"] if observed is not None else {}
    if meta and not meta.get("deletionTimestamp"):
        yield Delete(kind, meta["namespace"], meta["name"], meta["uid"])


_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "ownerReferences": "uid",
}
_QUANTITIES = frozenset({"requests", "limits"})
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


def differs(desired: Mapping[str, Any], observed: Mapping[str, Any] | None) -> bool:
    """Return whether the object must be applied.

    That is so if it is absent, has another desired hash, or a field that we set was changed.
    """
    if observed is None:
        return True
    return _annotation(desired) != _annotation(observed) or not _holds(desired, observed, "")


def _annotation(manifest: Mapping[str, Any]) -> Any:
    return (manifest["metadata"].get("annotations") or {}).get(DESIRED_HASH)


def _holds(desired: Any, observed: Any, key: str) -> bool:
    """Return whether the observed value contains everything desired."""
    if isinstance(desired, Mapping):
        return _mapping_holds(desired, observed, key)
    if isinstance(desired, Sequence) and not isinstance(desired, str):
        return _list_holds(desired, observed, key)
    if observed is None:
        return not desired  # the server omits false, zero and empty values
    return bool(desired == observed) or (key in ("sizeLimit", "quantity") and _same_quantity(desired, observed))


def _mapping_holds(desired: Mapping[str, Any], observed: Any, key: str) -> bool:
    if observed is None:
        return not desired
    inside = "quantity" if key in _QUANTITIES else ""
    return isinstance(observed, Mapping) and all(
        _holds(value, observed.get(name), inside or name) for name, value in desired.items()
    )


def _list_holds(desired: Sequence[Any], observed: Any, key: str) -> bool:
    if observed is None:
        return not desired
    if key in _KEYS:
        named = {item.get(_KEYS[key]): item for item in observed}
        return all(_holds(item, named.get(item[_KEYS[key]]), "") for item in desired)
    return len(desired) == len(observed) and all(
        _holds(mine, theirs, "") for mine, theirs in zip(desired, observed, strict=True)
    )


def _same_quantity(desired: object, observed: object) -> bool:
    texts = str(desired), str(observed)
    return all(_QUANTITY.fullmatch(text) for text in texts) and quantity(texts[0]) == quantity(texts[1])


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
