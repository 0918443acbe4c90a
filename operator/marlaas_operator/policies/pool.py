"""Plan and status of a ModelPool.

The pool owns its workers for as long as it exists, with or without jobs: loading an engine takes minutes. A deleted pool keeps serving until
the jobs that hold it have ended.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from marlaas_api.kinds import ModelPool, ModelSpec
from marlaas_api.kinds.status import ModelPoolStatus, unix_seconds
from marlaas_api.reasons import Reason
from marlaas_operator.installation import Installation
from marlaas_operator.manifests.pods import ROLES, workers_name
from marlaas_operator.manifests.pool import Pool, role_objects, role_secret, shared_objects
from marlaas_operator.plan import Action, AddFinalizer, Delete, Plan, RemoveFinalizer
from marlaas_operator.pod_facts import first_fault
from marlaas_operator.policies import child_reconcile
from marlaas_operator.policies.conditions import (
    ConditionState,
    conditions,
    events,
    is_urgent,
    status_patch,
    without_none,
)
from marlaas_operator.policies.job import CREDENTIAL_CHECK_S
from marlaas_operator.snapshot import JobLoad, PoolSnapshot

_STARTING = {"rollout": Reason.ROLLOUT_STARTING, "trainer": Reason.TRAINER_STARTING}
_READY = {"rollout": Reason.ROLLOUT_READY, "trainer": Reason.TRAINER_READY}
_MANY = 5


def pool_status(snapshot: PoolSnapshot, now: float) -> dict[str, Any]:
    """Return the complete status; without counts if the pool does not parse."""
    before = snapshot.status or {}
    found = conditions(_findings(snapshot), before.get("conditions") or (), snapshot.meta.generation, now)
    figures = _figures(snapshot, snapshot.pool) if snapshot.pool is not None else {}
    for role in figures.keys() & _STARTING.keys():
        figures[role] = without_none({**figures[role], "startSeconds": _start_s(before, found, role, now)})
    return without_none({"observedGeneration": snapshot.meta.generation, **figures, "conditions": found})


def holders(snapshot: PoolSnapshot) -> list[JobLoad]:
    """Return the jobs that block the pool's deletion: published and not ended.

    While the bus was not read, every job that has not ended counts.
    """
    return [job for job in snapshot.jobs if not job.phase.final and (job.published or not snapshot.bus.synced)]


def _figures(snapshot: PoolSnapshot, pool: ModelPool) -> dict[str, Any]:
    workers = {"rollout": pool.spec.rollout.replicas, "trainer": pool.spec.trainer.replicas}
    ready = {role: min(_num_ready(snapshot, role), workers[role]) for role in workers}
    return {
        "model": _model(pool.spec.model),
        **{role: {"replicas": workers[role], "ready": ready[role]} for role in workers},
        **{f"{role}Ready": f"{ready[role]}/{workers[role]}" for role in workers},
        **_held(snapshot, pool.spec.places),
    }


def _start_s(before: Mapping[str, Any], found: Iterable[Mapping[str, Any]], role: str, now: float) -> float | None:
    """Return the seconds until all workers of a role were ready, the last time that they were not; None if none of them has started yet."""
    type_ = _condition_of(role)
    is_ready = any(one["type"] == type_ and one["status"] == "True" for one in found)
    unready = [
        one for one in before.get("conditions") or () if one.get("type") == type_ and one.get("status") == "False"
    ]
    if is_ready and unready and (since := unix_seconds(unready[0].get("lastTransitionTime"))) is not None:
        return round(now - since, 1)
    return (before.get(role) or {}).get("startSeconds")


def _held(snapshot: PoolSnapshot, places: int) -> dict[str, Any]:
    """Return the jobs and slots in use; the stored values while the bus was not read. places: agents that the pool admits."""
    before = snapshot.status or {}
    if not snapshot.bus.synced:
        return {key: before.get(key) for key in ("jobs", "slots", "freeSlots")}
    admitted = [job for job in snapshot.jobs if job.admitted]
    used = sum(job.slots.get(snapshot.meta.name, 0) for job in admitted)
    return {"jobs": len(admitted), "slots": f"{used}/{places}", "freeSlots": max(0, places - used)}


def _findings(snapshot: PoolSnapshot) -> Iterator[ConditionState]:
    if snapshot.pool is None:
        yield ConditionState("Ready", False, Reason.INVALID_SPEC, snapshot.problem)
    else:
        yield from _serving(snapshot, snapshot.pool)
    if snapshot.meta.deleted_at is not None:
        yield _deleting(snapshot)


def _serving(snapshot: PoolSnapshot, pool: ModelPool) -> Iterator[ConditionState]:
    roles = [_role(snapshot, "rollout", pool), _role(snapshot, "trainer", pool)]
    yield from roles
    late = next((finding for finding in roles if not finding.holds), None)
    if late is not None:
        yield ConditionState("Ready", False, late.reason, late.message)
    else:
        yield ConditionState("Ready", True, Reason.READY, "all workers are ready")


def _condition_of(role: str) -> str:
    return f"{role.capitalize()}Ready"


def _role(snapshot: PoolSnapshot, role: str, pool: ModelPool) -> ConditionState:
    type_ = _condition_of(role)
    wanted = pool.spec.rollout.replicas if role == "rollout" else pool.spec.trainer.replicas
    ready = min(_num_ready(snapshot, role), wanted)
    counted = f"{ready} of {wanted} {role} workers are ready"
    if ready == wanted:
        return ConditionState(type_, True, _READY[role], counted)
    if snapshot.refusal:
        return ConditionState(type_, False, Reason.POD_REFUSED, f"{counted}; {snapshot.refusal}")
    pods = [pod for pod in snapshot.pods if pod.component == role]
    if pods and (fault := first_fault(pods)) is not None:
        return ConditionState(type_, False, fault.reason, f"{counted}; {fault.message}")
    return ConditionState(type_, False, _STARTING[role], counted)


def _deleting(snapshot: PoolSnapshot) -> ConditionState:
    held = [f"{job.namespace}/{job.name}" for job in holders(snapshot)]
    if not held:
        return ConditionState("Deleting", True, Reason.DELETING, "its workers are being stopped")
    more = f" and {len(held) - _MANY} more" if len(held) > _MANY else ""
    text = f"jobs that have not ended use it: {', '.join(held[:_MANY])}{more}; the pool is deleted when they have ended"
    return ConditionState("Deleting", False, Reason.IN_USE, text)


def _num_ready(snapshot: PoolSnapshot, role: str) -> int:
    return sum(pod.component == role and pod.ready and not pod.deleting for pod in snapshot.pods)


def _model(model: ModelSpec) -> str:
    if model.hub is not None:
        return f"{model.hub.id}@{model.hub.revision}"
    if model.pvc is not None:
        return f"{model.pvc.claim_name}:{model.pvc.path}"
    return model.builtin or model.path or ""


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
    first = (AddFinalizer(FINALIZER),) if FINALIZER not in snapshot.meta.finalizers else ()
    actions = (*first, *_worker_actions(snapshot, installation, now))
    ready = bool(snapshot.credentials) and bool(snapshot.pods) and all(pod.ready for pod in snapshot.pods)
    return _with_status(actions, snapshot, now, CREDENTIAL_CHECK_S if ready else child_reconcile.STUCK_S)


def _worker_actions(snapshot: PoolSnapshot, installation: Installation, now: float) -> Iterator[Action]:
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
        yield from child_reconcile.delete("StatefulSet", body)
    if sets or snapshot.pods or not snapshot.owned:
        return
    for role in ROLES:
        yield Delete("Secret", installation.namespace, workers_name(snapshot.meta.name, role))
    for (kind, _), body in sorted(snapshot.owned.items(), key=lambda item: (item[0][0] == "ServiceAccount", item[0])):
        yield from child_reconcile.delete(kind, body)


def _with_status(actions: tuple[Action, ...], snapshot: PoolSnapshot, now: float, requeue_s: float) -> Plan:
    after = pool_status(snapshot, now)
    patch = status_patch(snapshot.status, after, ModelPoolStatus)
    if patch is None:
        return Plan(actions, requeue_s=requeue_s)
    return Plan(actions, patch, is_urgent(snapshot.status, after), events(snapshot.status, after), requeue_s)
