"""Plan for a ModelPool.

The pool owns its workers for as long as it exists, with or without jobs: loading an engine takes minutes. A
deleted pool keeps serving until the jobs that hold it have ended.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from marlaas_api.kinds.status import ModelPoolStatus
from marlaas_operator.installation import Installation
from marlaas_operator.manifests.names import ROLES, workers_name
from marlaas_operator.manifests.pool import Pool, role_objects, role_secret, shared_objects
from marlaas_operator.plan import Action, AddFinalizer, Delete, Plan, RemoveFinalizer
from marlaas_operator.pod_facts import unix_seconds
from marlaas_operator.policies import child_reconcile, events
from marlaas_operator.policies.job import CREDENTIAL_CHECK_S
from marlaas_operator.policies.pool_status import holders, pool_status
from marlaas_operator.policies.status_patch import is_urgent, status_patch
from marlaas_operator.snapshot import PoolSnapshot

FINALIZER = "marlaas.dev/pool"
DRAIN_S = 60.0
"""Longest wait for the last worker of a deleted pool.

It counts from when no job holds the pool. Then the finalizer is removed and Kubernetes' garbage collector
deletes the rest.
"""


def plan_pool(snapshot: PoolSnapshot, installation: Installation, now: float) -> Plan:
    """Return the plan for a pool. now: unix seconds."""
    if snapshot.meta.deleted_at is not None:
        if FINALIZER not in snapshot.meta.finalizers:
            return Plan()
        if not holders(snapshot):
            return _plan_removal(snapshot, installation, now)
    begin = (AddFinalizer(FINALIZER),) if FINALIZER not in snapshot.meta.finalizers else ()
    actions = (*begin, *_upkeep(snapshot, installation, now))
    ready = bool(snapshot.credentials) and bool(snapshot.pods) and all(pod.ready for pod in snapshot.pods)
    return _with_status(actions, snapshot, now, CREDENTIAL_CHECK_S if ready else child_reconcile.STUCK_S)


def _upkeep(snapshot: PoolSnapshot, installation: Installation, now: float) -> Iterator[Action]:
    if snapshot.pool is None:
        return
    uid = snapshot.meta.uid
    pool = Pool(snapshot.meta, snapshot.pool, snapshot.credentials)
    yield from child_reconcile.put_right(shared_objects(pool, installation), snapshot.owned, uid)
    for role in ROLES:
        if role in snapshot.credentials:
            pods = [pod for pod in snapshot.pods if pod.component == role]
            secret = child_reconcile.Mounted(role_secret(pool, installation, role), pods)
            yield from child_reconcile.towards(role_objects(pool, installation, role), snapshot.owned, uid, secret, now)


def _plan_removal(snapshot: PoolSnapshot, installation: Installation, now: float) -> Plan:
    """Report the deletion in the status, delete the workers, then the other objects, then the finalizer.

    The other objects (network policies, Secrets) go once no pod is left. The status is written first, because
    its transition time starts the timeout `DRAIN_S`. The finalizer's removal is a plan of its own, so that a
    refused action cannot block it.
    """
    since = _stopping_since(snapshot)
    if since is None:
        return _with_status((), snapshot, now, 1.0)
    if (not snapshot.owned and not snapshot.pods) or now - since >= DRAIN_S:
        return Plan((RemoveFinalizer(FINALIZER),))
    return _with_status(tuple(_removal(snapshot, installation)), snapshot, now, max(1.0, since + DRAIN_S - now))


def _stopping_since(snapshot: PoolSnapshot) -> float | None:
    """Return when the condition `Deleting` became True, in unix seconds; None if it is not True."""
    for condition in (snapshot.status or {}).get("conditions") or ():
        if condition.get("type") == "Deleting" and condition.get("status") == "True":
            return unix_seconds(condition.get("lastTransitionTime"))
    return None


def _removal(snapshot: PoolSnapshot, installation: Installation) -> Iterator[Action]:
    sets = [body for (kind, _), body in snapshot.owned.items() if kind == "StatefulSet"]
    for body in sets:
        yield from _delete("StatefulSet", body)
    if sets or snapshot.pods or not snapshot.owned:
        return
    for role in ROLES:
        yield Delete("Secret", installation.namespace, workers_name(snapshot.meta.name, role))
    for (kind, _), body in sorted(snapshot.owned.items(), key=lambda item: (item[0][0] == "ServiceAccount", item[0])):
        yield from _delete(kind, body)


def _delete(kind: str, observed: Mapping[str, Any]) -> Iterator[Action]:
    meta = observed["metadata"]
    if not meta.get("deletionTimestamp"):
        yield Delete(kind, meta["namespace"], meta["name"], meta["uid"])


def _with_status(actions: tuple[Action, ...], snapshot: PoolSnapshot, now: float, requeue_s: float) -> Plan:
    after = pool_status(snapshot, now)
    patch = status_patch(snapshot.status, after, ModelPoolStatus)
    if patch is None:
        return Plan(actions, requeue_s=requeue_s)
    told = events.events(snapshot.status, after)
    return Plan(actions, patch, is_urgent(snapshot.status, after), told, requeue_s)
