"""Plan for a Tenant: its status, with the namespaces that belong to it and the usage of its jobs, and its usage history."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from marlaas_api.kinds.status import TenantStatus
from marlaas_api.messages import Phase, UsageAmounts
from marlaas_api.reasons import Reason
from marlaas_api.usage_objects import next_mark_s, usage_status, with_mark
from marlaas_operator.installation import Installation
from marlaas_operator.manifests import pods
from marlaas_operator.plan import Action, Manifest, Plan
from marlaas_operator.policies import child_reconcile
from marlaas_operator.policies.conditions import ConditionState, conditions, events, is_urgent, status_patch
from marlaas_operator.snapshot import JobLoad, TenantSnapshot

_HELD = ("jobs", "queued", "adapterSlots", "shareEntitled", "shareHeld", "tokensPerSecond", "storageBytes")
_USED = ("usage", "deletedUsage")


def plan_tenant(snapshot: TenantSnapshot, installation: Installation, now: float) -> Plan:
    """Return the plan for a Tenant. now: unix seconds."""
    if snapshot.meta.deleted_at is not None:
        return Plan()
    actions: tuple[Action, ...] = ()
    requeue_s = None
    total = _total(snapshot)
    if total is not None:
        history = _history(snapshot, total, installation, now)
        actions = tuple(child_reconcile.put_right([history], snapshot.owned, snapshot.meta.uid))
        requeue_s = next_mark_s(now)
    before = snapshot.status or {}
    found = conditions([_active(snapshot)], before.get("conditions") or (), snapshot.meta.generation, now)
    used = _used(snapshot) | {"usageHistory": before.get("usageHistory")}
    if total is not None:
        used["usageHistory"] = f"{installation.namespace}/{pods.history_name(snapshot.meta.name)}"
    after = {"observedGeneration": snapshot.meta.generation, "conditions": found, **_holds(snapshot), **used}
    patch = status_patch(snapshot.status, after, TenantStatus)
    if patch is None:
        return Plan(actions, requeue_s=requeue_s)
    urgent = is_urgent(snapshot.status, after)
    return Plan(actions, patch, urgent, events(snapshot.status, after), requeue_s)


def _total(snapshot: TenantSnapshot) -> UsageAmounts | None:
    """Return the total to mark: zeros for a tenant that never had a job, so that its first jobs lie behind a mark; None if unknown."""
    if not snapshot.bus.synced:
        return None
    if snapshot.usage is not None:
        return snapshot.usage.total
    return None if "usage" in (snapshot.status or {}) else UsageAmounts()


def _history(snapshot: TenantSnapshot, total: UsageAmounts, installation: Installation, now: float) -> Manifest:
    """Return the ConfigMap with the observed marks and that of the current hour."""
    name = pods.history_name(snapshot.meta.name)
    metadata = {
        "name": name,
        "namespace": installation.namespace,
        "labels": pods.labels(installation.release, "usage", {pods.TENANT: snapshot.meta.name}),
        "ownerReferences": [pods.owner_reference("Tenant", snapshot.meta)],
    }
    marks = snapshot.owned.get(("ConfigMap", name), {}).get("data") or {}
    data = with_mark(marks, total, now)
    return pods.stamped({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def _active(snapshot: TenantSnapshot) -> ConditionState:
    if snapshot.tenant is None:
        return ConditionState("Active", False, Reason.INVALID_SPEC, snapshot.problem)
    lost = [
        f"namespace '{namespace}' belongs to Tenant '{owner}', which is older"
        for namespace, owner in snapshot.lost.items()
    ]
    if lost:
        return ConditionState(
            "Active", False, Reason.CONFLICTING_TENANTS, f"{'; '.join(lost)}; remove it from one of them"
        )
    return ConditionState("Active", True, Reason.ACTIVE, "its namespaces belong to it")


def _holds(snapshot: TenantSnapshot) -> dict[str, Any]:
    """Return the usage of the tenant's jobs."""
    if not snapshot.bus.synced or snapshot.tenant is None:  # keep the stored values
        before = snapshot.status or {}
        return {key: before[key] for key in _HELD if key in before}
    admitted = [job for job in snapshot.jobs if job.admitted]
    return {
        "jobs": len(admitted),
        "queued": sum(job.phase is Phase.QUEUED for job in snapshot.jobs),
        "adapterSlots": sum(sum(job.slots.values()) for job in admitted),
        "shareEntitled": _entitled(snapshot),
        "shareHeld": _held(snapshot, admitted),
        "tokensPerSecond": float(round(sum(job.tokens_per_s for job in admitted))),
        "storageBytes": sum(job.stored_bytes for job in snapshot.jobs),
    }


def _used(snapshot: TenantSnapshot) -> dict[str, Any]:
    """Return the total usage. It stays as stored while the bus has none: the orchestrator has not written it, or it is not read yet."""
    if snapshot.usage is None:
        before = snapshot.status or {}
        return {key: before[key] for key in _USED if key in before}
    deleted = usage_status(snapshot.usage.removed)
    return {"usage": usage_status(snapshot.usage.total), **({"deletedUsage": deleted} if deleted else {})}


def _entitled(snapshot: TenantSnapshot) -> float:
    """Return the tenant's part of the weights of all tenants that have jobs; itself counts in any case."""
    assert snapshot.tenant is not None
    weights = {**snapshot.weights, snapshot.meta.name: snapshot.tenant.spec.weight}
    return round(weights[snapshot.meta.name] / sum(weights.values()), 2)


def _held(snapshot: TenantSnapshot, admitted: Sequence[JobLoad]) -> float:
    held: Counter[str] = Counter()
    for job in admitted:
        held.update(job.slots)
    shares = (slots / snapshot.places[pool] for pool, slots in held.items() if snapshot.places.get(pool))
    return round(max(shares, default=0.0), 2)
