"""Plan and status of an RLJob, and the plan for a document whose RLJob no longer exists.

Actions come in the order finalizer, document, sandbox, deletion by ttl. Each one is useful without those after it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from marlaas_api.kinds.status import RLJobStatus, unix_seconds
from marlaas_api.messages import JobDocument, JobVerdict, Phase, Progress
from marlaas_api.reasons import Reason
from marlaas_operator.installation import Installation
from marlaas_operator.manifests.network import closed_destinations
from marlaas_operator.plan import Action, AddFinalizer, DeleteObject, Plan, RemoveFinalizer
from marlaas_operator.pod_facts import first_fault
from marlaas_operator.policies import child_reconcile, exporter
from marlaas_operator.policies.child_reconcile import STUCK_S
from marlaas_operator.policies.conditions import (
    HEALTHY,
    ConditionState,
    clipped,
    conditions,
    events,
    is_urgent,
    rfc3339,
    status_patch,
    without_none,
)
from marlaas_operator.policies.job_figures import job_figures
from marlaas_operator.policies.job_phase import (
    MISFITS,
    StatusSummary,
    forget,
    is_over,
    look_again_s,
    publish_document,
    sandbox_fault,
    status_summary,
    wanted_document,
)
from marlaas_operator.snapshot import JobSnapshot

ADMITTED, SANDBOX_READY, COMPLETE, FAILED = "Admitted", "SandboxReady", "Complete", "Failed"
_FIGURES = (
    *("progress", "step", "steps", "agents", "versions", "reward", "evalBefore", "evalLast", "staleness"),
    *("tokens", "tokensPerSecond", "acceleratorSeconds", "usage", "faults", "trainingFaults", "startedAt"),
)


def job_status(snapshot: JobSnapshot, summary: StatusSummary, wanted: JobDocument | None, now: float) -> dict[str, Any]:
    """Return the complete status.

    Args:
        summary: phase, reason and message.
        wanted: the job's document, which names its tenant; None keeps the stored tenant.
        now: unix seconds.
    """
    before: Mapping[str, Any] = snapshot.status or {}
    phase = summary.phase or Phase(before.get("phase") or Phase.QUEUED)
    progress = snapshot.own_progress
    figures = job_figures(snapshot.job, progress) if progress is not None else {k: before.get(k) for k in _FIGURES}
    status = {
        "observedGeneration": snapshot.meta.generation,
        "phase": str(phase),
        "reason": str(summary.reason) or None,
        "message": clipped(summary.message) or None,
        "tenant": wanted.tenant if wanted is not None else before.get("tenant"),
        **figures,
        "trackers": exporter.trackers(snapshot) or before.get("trackers"),
        "sandboxCrashes": sandbox_crashes(snapshot, now) or None,
        "finishedAt": _finished_at(progress, before, now) if phase.final else None,
        "conditions": conditions(
            _findings(snapshot, summary, phase, now), before.get("conditions") or (), snapshot.meta.generation, now
        ),
    }
    return without_none(status)


def sandbox_crashes(snapshot: JobSnapshot, now: float) -> int:
    """Return the crashes in a row of the sandbox that crashes most, and the pods that were evicted because they wrote too much.

    One sandbox is enough: all run the same code. Crashes of all would be as many as the job has sandboxes after one fault of a node.
    Those for memory are the environment's own, and one task goes from sandbox to sandbox: they count over all sandboxes. Otherwise the task would
    be given up (`MAX_DELIVERIES` of the sandbox) before one sandbox has crashed often enough.
    """
    return max(_most_crashes(snapshot, now), _memory_kills(snapshot, now)) + sum(pod.overran for pod in snapshot.pods)


def _most_crashes(snapshot: JobSnapshot, now: float) -> int:
    return max((pod.crashes(now) for pod in snapshot.pods), default=0)


def _memory_kills(snapshot: JobSnapshot, now: float) -> int:
    return sum(pod.memory_kills(now) for pod in snapshot.pods)


def _finished_at(progress: Progress | None, before: Mapping[str, Any], now: float) -> str:
    if progress is not None and progress.finished_at is not None:
        return rfc3339(progress.finished_at)
    return str(before.get("finishedAt") or rfc3339(now))


def _findings(snapshot: JobSnapshot, summary: StatusSummary, phase: Phase, now: float) -> Iterator[ConditionState]:
    if snapshot.own_progress is not None or not snapshot.unreadable:  # unknown: they stay
        yield _admitted(snapshot, summary, phase)
        yield _sandbox_ready(snapshot, summary, phase)
    seen = {condition.get("type") for condition in (snapshot.status or {}).get("conditions") or ()}
    if snapshot.own_progress is not None and (snapshot.own_progress.warnings or HEALTHY in seen):
        yield _healthy(snapshot.own_progress)
    if (reporting := exporter.finding(snapshot, now)) is not None:
        yield reporting
    for type_, final in ((COMPLETE, Phase.SUCCEEDED), (FAILED, Phase.FAILED)):
        if phase is final or type_ in seen:
            yield ConditionState(type_, phase is final, summary.reason, summary.message)


def _healthy(progress: Progress) -> ConditionState:
    """Whether the figures of the job's last step and evaluation are within their bounds."""
    if not progress.warnings:
        return ConditionState(
            HEALTHY, True, Reason.HEALTHY, "the figures of the last step and evaluation are within their bounds"
        )
    return ConditionState(HEALTHY, False, next(iter(progress.warnings)), "; ".join(progress.warnings.values()))


def _admitted(snapshot: JobSnapshot, summary: StatusSummary, phase: Phase) -> ConditionState:
    progress = snapshot.own_progress
    if summary.reason == Reason.DELETING:
        return ConditionState(ADMITTED, False, Reason.DELETING, summary.message)
    if phase.final:
        return ConditionState(ADMITTED, False, Reason.FINISHED, "the job has ended and holds nothing of its pool")
    if progress is None:
        return ConditionState(ADMITTED, False, summary.reason, summary.message)
    if snapshot.hold is not None:
        return ConditionState(ADMITTED, False, snapshot.hold.reason, snapshot.hold.message)
    if progress.admitted:
        return ConditionState(ADMITTED, True, Reason.ADMITTED, "the job is admitted to its pool")
    waiting = summary if summary.reason in MISFITS else progress
    return ConditionState(ADMITTED, False, waiting.reason, waiting.message)


def _sandbox_ready(snapshot: JobSnapshot, summary: StatusSummary, phase: Phase) -> ConditionState:
    progress = snapshot.own_progress
    if summary.reason == Reason.DELETING:
        return ConditionState(SANDBOX_READY, False, Reason.DELETING, summary.message)
    if phase.final:
        return ConditionState(SANDBOX_READY, False, Reason.FINISHED, "the job has ended")
    wanted = snapshot.num_sandboxes
    if progress is None or not progress.admitted or wanted is None:
        return ConditionState(SANDBOX_READY, False, Reason.NOT_ADMITTED, "a job has sandboxes once it is admitted")
    ready = min(wanted, sum(pod.ready and not pod.deleting for pod in snapshot.pods))
    counted = f"{ready} of {wanted} sandboxes are ready"
    if ready == wanted:
        return ConditionState(SANDBOX_READY, True, Reason.SANDBOX_READY, counted)
    fault = sandbox_fault(snapshot)
    if fault is not None:
        return ConditionState(SANDBOX_READY, False, fault.reason, f"{counted}; {fault.message}")
    return ConditionState(SANDBOX_READY, False, Reason.SANDBOX_STARTING, f"{counted}{_needed_volumes(snapshot)}")


def _needed_volumes(snapshot: JobSnapshot) -> str:
    """Return the words about the volumes without which no pod starts; of a missing one, a pod says nothing. Empty: it has none."""
    if snapshot.job is None or not snapshot.job.spec.environment.volumes:
        return ""
    volumes = snapshot.job.spec.environment.volumes
    names = [f"ConfigMap {one.config_map.name}" for one in volumes if one.config_map is not None]
    names += [f"PersistentVolumeClaim {one.pvc.claim_name}" for one in volumes if one.pvc is not None]
    return f"; they start once the namespace has {', '.join(names)}"


def crash_verdict(snapshot: JobSnapshot, now: float) -> JobVerdict | None:
    """Return the verdict that stops a job with too many sandbox crashes; None if it may continue."""
    progress, job = snapshot.own_progress, snapshot.job
    if job is None or progress is None or not progress.admitted or progress.phase.final:
        return None
    crashes, limit = sandbox_crashes(snapshot, now), job.spec.backoff_limit
    if crashes <= limit:
        return None
    fault = first_fault(snapshot.pods)
    last = f"; the last crash: {fault.message}" if fault is not None else ""
    is_memory = _memory_kills(snapshot, now) > _most_crashes(snapshot, now)
    what = (
        "its sandboxes have exceeded their limit of memory or disk" if is_memory else "one of its sandboxes has crashed"
    )
    text = f"{what} {crashes} times in a row, and backoffLimit is {limit}{last}"
    return JobVerdict(reason=Reason.BACKOFF_LIMIT_EXCEEDED, message=text)


def plan_orphan(document: JobDocument) -> Plan:
    """Return the plan for a document without an RLJob of its uid."""
    write = forget(document)
    return Plan(actions=(write,) if write is not None else ())


FINALIZER = "marlaas.dev/job"
FORGET_S = 60.0
"""Longest wait of a deletion for the bus, the orchestrator and the last pod.

It counts by our own clock from when this operator first saw the deletion. Then the finalizer is removed; the
sweep and Kubernetes' garbage collector delete the rest.
"""
CREDENTIAL_CHECK_S = 600.0
EXPIRE_AGAIN_S = 10.0
"""Interval at which a refused deletion by ttl is retried."""


def plan_job(snapshot: JobSnapshot, installation: Installation, now: float) -> Plan:
    """Return the plan for a job. now: unix seconds."""
    if snapshot.meta.deleted_at is not None:
        return _plan_deletion(snapshot, now)
    spec = snapshot.job.spec if snapshot.job is not None else None
    if spec is not None and (egress := (*spec.environment.egress, *spec.export.egress)):
        ranges = dict.fromkeys(each.cidr for each in egress)
        snapshot = replace(snapshot, closed_egress=closed_destinations(ranges, installation))
    wanted = wanted_document(snapshot, crash_verdict(snapshot, now), now)
    write = publish_document(snapshot, wanted)
    due = (expires_s := _expires_s(snapshot, now)) is not None and expires_s <= 0
    actions: tuple[Action, ...] = (
        *((AddFinalizer(FINALIZER),) if FINALIZER not in snapshot.meta.finalizers else ()),
        *((write,) if write is not None else ()),
        *_sandbox_actions(snapshot, wanted, installation, now),
        *((DeleteObject(snapshot.meta.uid),) if due else ()),
    )
    summary = status_summary(snapshot, now)
    after = job_status(snapshot, summary, wanted, now) if summary is not None else snapshot.status
    aside = exporter.actions(snapshot, installation, now)
    expires_s = EXPIRE_AGAIN_S if due else _expires_s(replace(snapshot, status=after), now)
    requeue_s = soonest(
        expires_s, look_again_s(snapshot, now), _sandbox_check_s(snapshot), exporter.check_s(snapshot, now)
    )
    return _with_status(Plan(actions, requeue_s=requeue_s, aside=aside), snapshot, after)


def _sandbox_actions(
    snapshot: JobSnapshot, wanted: JobDocument | None, installation: Installation, now: float
) -> tuple[Action, ...]:
    if snapshot.sandbox_wanted and not (wanted is not None and wanted.is_held):
        return child_reconcile.plan_sandbox(snapshot, wanted, installation, now)
    return tuple(child_reconcile.removal(snapshot)) if snapshot.sandbox_wanted is not None and snapshot.owned else ()


def _plan_deletion(snapshot: JobSnapshot, now: float) -> Plan:
    """Stop the job, delete what it owns, wait until the orchestrator has forgotten it, and remove the finalizer."""
    if FINALIZER not in snapshot.meta.finalizers:
        return Plan()
    own, bus = snapshot.own_document, snapshot.bus
    left_s = snapshot.deletion_seen_at + FORGET_S - now
    if left_s <= 0:  # alone: a permanently refused action must not block it
        return Plan((RemoveFinalizer(FINALIZER),))
    is_known = bus.synced and bus.available and not snapshot.unreadable
    write = forget(own) if own is not None and is_known else None
    forgotten = is_known and own is None
    gone = forgotten and not snapshot.owned and not snapshot.pods and not snapshot.exporter_pods
    removal = (*child_reconcile.removal(snapshot), *exporter.removal(snapshot))
    actions: list[Action] = [*((write,) if write is not None else ()), *removal]
    if gone:
        return Plan((RemoveFinalizer(FINALIZER),))
    summary = StatusSummary(None, Reason.DELETING, "the job is being stopped; its slots and files are being freed")
    return _with_status(Plan(tuple(actions), requeue_s=left_s), snapshot, job_status(snapshot, summary, own, now))


def _with_status(plan: Plan, snapshot: JobSnapshot, after: Mapping[str, Any] | None) -> Plan:
    """Return the plan with the new status and its events; unchanged if the status is None or does not differ."""
    patch = status_patch(snapshot.status, after, RLJobStatus) if after is not None else None
    if after is None or patch is None:
        return plan
    urgent = is_urgent(snapshot.status, after)
    return replace(plan, status=patch, urgent=urgent, events=events(snapshot.status, after))


def _expires_s(snapshot: JobSnapshot, now: float) -> float | None:
    """Return the seconds until an ended job is to be deleted; None: no ttl, not ended, still uploading its adapters, or unknown."""
    ttl = snapshot.job.spec.ttl_seconds_after_finished if snapshot.job is not None else None
    finished_at = unix_seconds((snapshot.status or {}).get("finishedAt"))
    if ttl is None or finished_at is None or not _has_ended(snapshot) or exporter.is_uploading(snapshot, now):
        return None
    return finished_at + ttl - now


def _has_ended(snapshot: JobSnapshot) -> bool:
    """Return whether the job has ended and has no steps left.

    A job whose `steps` were raised continues, even if the orchestrator has not read the change yet.
    """
    progress, job = snapshot.own_progress, snapshot.job
    if progress is None:
        return snapshot.progress_known and is_over(snapshot)
    more = progress.phase is Phase.SUCCEEDED and job is not None and job.spec.training.steps > progress.step
    return progress.phase.final and not more


def _sandbox_check_s(snapshot: JobSnapshot) -> float | None:
    """Return after how many seconds to check the sandbox again; None if the job has none.

    A credential is renewed by time; a missing credential and a pod that cannot start are checked sooner.
    """
    if not snapshot.sandbox_wanted:
        return None
    pods = [pod for pod in snapshot.pods if not pod.ended]
    is_running = snapshot.credential is not None and bool(pods) and all(pod.ready for pod in pods)
    return CREDENTIAL_CHECK_S if is_running else STUCK_S


def soonest(*waits_s: float | None) -> float | None:
    """Return the shortest of the given waits, at least 0; None if all are None."""
    known = [max(0.0, wait) for wait in waits_s if wait is not None]
    return min(known, default=None)
