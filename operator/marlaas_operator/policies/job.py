"""Plan for an RLJob.

Actions come in the order finalizer, document, sandbox, deletion by ttl. Each one is useful without those after
it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from marlaas_api.kinds.status import RLJobStatus
from marlaas_api.messages import Phase
from marlaas_api.reasons import Reason
from marlaas_operator.installation import Installation
from marlaas_operator.manifests.names import sandbox_name
from marlaas_operator.plan import Action, AddFinalizer, DeleteObject, Plan, RemoveFinalizer
from marlaas_operator.pod_facts import unix_seconds
from marlaas_operator.policies import backoff, document_publishing, events, sandboxes
from marlaas_operator.policies.child_reconcile import STUCK_S
from marlaas_operator.policies.clock import soonest
from marlaas_operator.policies.job_status import job_status
from marlaas_operator.policies.status_patch import is_urgent, status_patch
from marlaas_operator.policies.status_summary import StatusSummary, look_again_s, status_summary
from marlaas_operator.snapshot import JobSnapshot

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
    wanted = document_publishing.wanted_document(snapshot, backoff.verdict(snapshot))
    write = document_publishing.publish_document(snapshot, wanted)
    due = (expires_s := _expires_s(snapshot, now)) is not None and expires_s <= 0
    actions: tuple[Action, ...] = (
        *((AddFinalizer(FINALIZER),) if FINALIZER not in snapshot.meta.finalizers else ()),
        *((write,) if write is not None else ()),
        *sandboxes.plan_sandbox(snapshot, wanted, installation, now),
        *((DeleteObject(snapshot.meta.uid),) if due else ()),
    )
    told = status_summary(snapshot, sandbox_name(snapshot.meta.name), now)
    after = job_status(snapshot, told, wanted, now) if told is not None else snapshot.status
    expires_s = EXPIRE_AGAIN_S if due else _expires_s(replace(snapshot, status=after), now)
    requeue_s = soonest(expires_s, look_again_s(snapshot, now), _sandbox_check_s(snapshot))
    return _telling(Plan(actions, requeue_s=requeue_s), snapshot, after)


def _plan_deletion(snapshot: JobSnapshot, now: float) -> Plan:
    """Stop the job, delete what it owns, wait until the orchestrator has forgotten it, and remove the finalizer."""
    if FINALIZER not in snapshot.meta.finalizers:
        return Plan()
    own, bus = snapshot.own_document, snapshot.bus
    left_s = snapshot.deletion_seen_at + FORGET_S - now
    if left_s <= 0:  # alone: a permanently refused action must not block it
        return Plan((RemoveFinalizer(FINALIZER),))
    write = document_publishing.forget(own) if own is not None and bus.synced and bus.available else None
    forgotten = bus.synced and bus.available and own is None
    gone = forgotten and not snapshot.owned and not snapshot.pods
    actions: list[Action] = [*((write,) if write is not None else ()), *sandboxes.removal(snapshot)]
    if gone:
        return Plan((RemoveFinalizer(FINALIZER),))
    told = StatusSummary(None, Reason.DELETING, "the job is being stopped; its slots and files are being freed")
    return _telling(Plan(tuple(actions), requeue_s=left_s), snapshot, job_status(snapshot, told, own, now))


def _telling(plan: Plan, snapshot: JobSnapshot, after: Mapping[str, Any] | None) -> Plan:
    """Return the plan with the new status and its events; unchanged if the status is None or does not differ."""
    patch = status_patch(snapshot.status, after, RLJobStatus) if after is not None else None
    if after is None or patch is None:
        return plan
    urgent = is_urgent(snapshot.status, after)
    return Plan(plan.actions, patch, urgent, events.events(snapshot.status, after), plan.requeue_s)


def _expires_s(snapshot: JobSnapshot, now: float) -> float | None:
    """Return the seconds until an ended job is to be deleted; None: no ttl, not ended, or unknown."""
    ttl = snapshot.job.spec.ttl_seconds_after_finished if snapshot.job is not None else None
    finished_at = unix_seconds((snapshot.status or {}).get("finishedAt"))
    return None if ttl is None or finished_at is None or not _has_ended(snapshot) else finished_at + ttl - now


def _has_ended(snapshot: JobSnapshot) -> bool:
    """Return whether the job has ended and has no steps left.

    A job whose `steps` were raised continues, even if the orchestrator has not read the change yet.
    """
    progress, job = snapshot.own_progress, snapshot.job
    if progress is None:
        return snapshot.progress_known and document_publishing.is_over(snapshot)
    more = progress.phase is Phase.SUCCEEDED and job is not None and job.spec.training.steps > progress.step
    return progress.phase.final and not more


def _sandbox_check_s(snapshot: JobSnapshot) -> float | None:
    """Return after how many seconds to check the sandbox again; None if the job has none.

    A credential is renewed by time; a missing credential and a pod that cannot start are checked sooner.
    """
    if not sandboxes.is_wanted(snapshot):
        return None
    pods = [pod for pod in snapshot.pods if not pod.ended]
    begun = snapshot.credential is not None and bool(pods) and all(pod.ready for pod in pods)
    return CREDENTIAL_CHECK_S if begun else STUCK_S
