"""Status of a ModelPool: ready workers, slots in use, and faults of workers that are not ready."""

from collections.abc import Iterator
from typing import Any

from marlaas_api.kinds import ModelPool, ModelSpec
from marlaas_api.reasons import Reason
from marlaas_operator.policies.conditions import ConditionState, conditions
from marlaas_operator.policies.faults import first_fault
from marlaas_operator.policies.status_patch import without_none
from marlaas_operator.snapshot import JobLoad, PoolSnapshot

_STARTING = {"rollout": Reason.ROLLOUT_STARTING, "trainer": Reason.TRAINER_STARTING}
_READY = {"rollout": Reason.ROLLOUT_READY, "trainer": Reason.TRAINER_READY}
_MANY = 5


def pool_status(snapshot: PoolSnapshot, now: float) -> dict[str, Any]:
    """Return the complete status; without counts if the pool does not parse."""
    before = snapshot.status or {}
    found = conditions(_findings(snapshot), before.get("conditions") or (), snapshot.meta.generation, now)
    figures = _figures(snapshot, snapshot.pool) if snapshot.pool is not None else {}
    return without_none({"observedGeneration": snapshot.meta.generation, **figures, "conditions": found})


def holders(snapshot: PoolSnapshot) -> list[JobLoad]:
    """Return the jobs that block the pool's deletion: published and not ended.

    While the bus was not read, every job that has not ended counts.
    """
    return [job for job in snapshot.jobs if not job.phase.final and (job.begun or not snapshot.bus.synced)]


def _figures(snapshot: PoolSnapshot, pool: ModelPool) -> dict[str, Any]:
    workers = {"rollout": pool.spec.rollout.replicas, "trainer": pool.spec.trainer.replicas}
    ready = {role: min(_num_ready(snapshot, role), workers[role]) for role in workers}
    return {
        "model": _model(pool.spec.model),
        **{role: {"replicas": workers[role], "ready": ready[role]} for role in workers},
        **{f"{role}Ready": f"{ready[role]}/{workers[role]}" for role in workers},
        **_held(snapshot, pool.spec.adapter_slots),
    }


def _held(snapshot: PoolSnapshot, slots: int) -> dict[str, Any]:
    """Return the jobs and slots in use; the stored values while the bus was not read."""
    before = snapshot.status or {}
    if not snapshot.bus.synced:
        return {key: before.get(key) for key in ("jobs", "slots", "freeSlots")}
    admitted = [job for job in snapshot.jobs if job.admitted]
    used = sum(job.slots for job in admitted)
    return {"jobs": len(admitted), "slots": f"{used}/{slots}", "freeSlots": max(0, slots - used)}


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
        yield ConditionState("Ready", True, Reason.READY, "every worker serves")


def _role(snapshot: PoolSnapshot, role: str, pool: ModelPool) -> ConditionState:
    type_ = f"{role.capitalize()}Ready"
    wanted = pool.spec.rollout.replicas if role == "rollout" else pool.spec.trainer.replicas
    ready = min(_num_ready(snapshot, role), wanted)
    counted = f"{ready} of {wanted} {role} workers serve"
    if ready == wanted:
        return ConditionState(type_, True, _READY[role], counted)
    if snapshot.refusal:
        return ConditionState(type_, False, Reason.POD_REFUSED, f"{counted}; {snapshot.refusal}")
    fault = first_fault(pod for pod in snapshot.pods if pod.component == role)
    if fault is not None:
        return ConditionState(type_, False, fault.reason, f"{counted}; {fault.message}")
    return ConditionState(type_, False, _STARTING[role], counted)


def _deleting(snapshot: PoolSnapshot) -> ConditionState:
    held = [f"{job.namespace}/{job.name}" for job in holders(snapshot)]
    if not held:
        return ConditionState("Deleting", True, Reason.DELETING, "its workers are being stopped")
    more = f" and {len(held) - _MANY} more" if len(held) > _MANY else ""
    text = f"jobs that have not ended use it: {', '.join(held[:_MANY])}{more}; it goes when they are gone"
    return ConditionState("Deleting", False, Reason.IN_USE, text)


def _num_ready(snapshot: PoolSnapshot, role: str) -> int:
    return sum(pod.component == role and pod.ready and not pod.deleting for pod in snapshot.pods)


def _model(model: ModelSpec) -> str:
    if model.hub is not None:
        return f"{model.hub.id}@{model.hub.revision}"
    if model.pvc is not None:
        return f"{model.pvc.claim_name}:{model.pvc.path}"
    return model.builtin or model.path or ""
