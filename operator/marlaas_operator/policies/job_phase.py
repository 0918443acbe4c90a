"""Where a job stands: whether its document may be published, and the phase, reason and message of its status.

The orchestrator decides admission and the phase. A published document is kept: a later change or deletion of the
pool does not stop a running job. A job that does not fit its pool's spec stays queued with a reason, and is checked
again whenever the pool changes: the job may have been created just before the pool's update. A job fails for good
only if no change of a pool could help.

The operator adds what only it observes: missing objects, pods that are not ready, an unavailable bus. Incomplete
observations leave the status unchanged.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from marlaas_api.documents import job_document
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.checks import check_cluster, check_fit, check_supported, pool_text
from marlaas_api.kinds.fields import listed
from marlaas_api.kinds.problems import Problem
from marlaas_api.messages import JobDocument, JobHold, JobVerdict, Phase, Progress
from marlaas_api.reasons import Reason
from marlaas_operator.manifests.pods import sandbox_name
from marlaas_operator.plan import WriteDocument
from marlaas_operator.pod_facts import PodFacts, PodFault, first_fault, refusal_of
from marlaas_operator.snapshot import JobPool, JobSnapshot

MISFITS = frozenset({Reason.NEVER_FITS, Reason.NAMESPACE_NOT_ALLOWED})
"""Reasons to queue a job although its pool exists: the pool's spec does not allow what the job requests."""
BUS_PATIENCE_S = 10.0
"""Unavailability of the bus that is not reported: a restart takes less."""
LEADER_PATIENCE_S = 3.0
"""Time for a new orchestrator to take the lease, which itself expires 10 s after the last renewal."""
FIRST_HOLD_S, LONGEST_HOLD_S = 60.0, 3600.0
"""Time for which a job is not admitted after its pods were refused; it doubles with each refusal in a row."""
FIRST_WORD_S = 2.0
"""Wait of a new job's first status for the orchestrator, so that a queued job costs one patch."""
_LEADER = (
    "no orchestrator holds the leader lease; tasks that were issued are still played and trained, and no data is lost"
)
_BUS = "NATS does not answer; running work continues as far as it can, and no data is lost"


@dataclass(frozen=True, slots=True)
class PublishRefusal:
    """Reason why a job's document is not published.

    phase None: unchanged; Queued: until the cause is gone; Failed: for good.
    """

    phase: Phase | None
    reason: Reason
    message: str


def refused(snapshot: JobSnapshot) -> PublishRefusal | None:
    """Return why the job's document is not published.

    None if it is published, may be published, or the bus was not read yet and may have it.
    """
    if snapshot.own_document is not None or not snapshot.bus.synced or snapshot.unreadable:
        return None
    if snapshot.job is None:
        return PublishRefusal(None, Reason.INVALID_SPEC, snapshot.problem)
    unsupported = (*check_supported(snapshot.job), *check_cluster(snapshot.job))
    if unsupported:
        return PublishRefusal(Phase.FAILED, Reason.UNSUPPORTED, _sentences(unsupported))
    unfit = _pools_missing(snapshot.job, snapshot.pools) or unfit_now(snapshot)
    if unfit is not None:
        return unfit
    if snapshot.closed_egress:
        return PublishRefusal(
            Phase.QUEUED, Reason.EGRESS_NOT_ALLOWED, f"{_closed(snapshot)}; the job starts once it is open"
        )
    if snapshot.unread_tenant:  # published now, the job would run without the Tenant's quota
        text = (
            f"Tenant '{snapshot.unread_tenant}' of this namespace cannot be read; the job starts once it is corrected"
        )
        return PublishRefusal(Phase.QUEUED, Reason.INVALID_SPEC, text)
    if snapshot.tenant_missing:
        text = (
            f"no Tenant has the namespace '{snapshot.meta.namespace}', and this installation requires one; "
            "ask the platform team to add the namespace to a Tenant"
        )
        return PublishRefusal(Phase.QUEUED, Reason.TENANT_REQUIRED, text)
    if snapshot.queue_full:
        return PublishRefusal(Phase.QUEUED, Reason.OVER_QUOTA, snapshot.queue_full)
    if snapshot.document is not None:
        text = "an earlier job of the same name is being deleted; this one starts after that"
        return PublishRefusal(Phase.QUEUED, Reason.WAITING_FOR_ORCHESTRATOR, text)
    return None


def is_over(snapshot: JobSnapshot) -> bool:
    """Return whether the stored status is final and the bus has no progress of the job.

    A finished job is not started again because the bus lost its data. A succeeded job whose `steps` were raised
    is not over.
    """
    status = snapshot.status or {}
    if snapshot.own_progress is not None:
        return False
    if status.get("phase") == Phase.SUCCEEDED and snapshot.job is not None:
        return snapshot.job.spec.training.steps <= int(status.get("step") or 0)
    return status.get("phase") in (Phase.SUCCEEDED, Phase.FAILED)


def unfit_now(snapshot: JobSnapshot) -> PublishRefusal | None:
    """Return what the specs of a job's pools do not allow, also after its document was published.

    None if it fits; a missing pool allows everything.
    """
    job = snapshot.job
    pools = [one.pool for one in snapshot.pools if one.pool is not None]
    problems = [problem for pool in pools for problem in check_fit(job, pool)] if job is not None else []
    if not problems:
        return None
    foreign = problems[0].loc[0] == "metadata"
    text = f"{_sentences(problems)}. The job starts once the pool is changed so that it fits"
    return PublishRefusal(Phase.QUEUED, Reason.NAMESPACE_NOT_ALLOWED if foreign else Reason.NEVER_FITS, text)


def _closed(snapshot: JobSnapshot) -> str:
    return f"egress {listed(snapshot.closed_egress)} is not open to jobs (network.jobEgress of the chart)"


def _pools_missing(job: RLJob, pools: Iterable[JobPool]) -> PublishRefusal | None:
    """Return which pools do not exist, or not for long; None if all exist."""
    missing = []
    for one in pools:
        absent = f"cannot be read ({one.problem})" if one.problem else "does not exist"
        state = "is being deleted" if one.pool is not None else absent
        if one.pool is None or one.deleting:
            missing.append(f"{pool_text(job, one.name)} {state}")
    if not missing:
        return None
    awaited = "a pool of this name exists" if len(missing) == 1 else "pools of these names exist"
    text = f"{'; '.join(missing)}; the job starts when {awaited}"
    return PublishRefusal(Phase.QUEUED, Reason.POOL_NOT_FOUND, text)


def _sentences(problems: Iterable[Problem]) -> str:
    return "; ".join(str(problem) for problem in problems)


def wanted_document(snapshot: JobSnapshot, verdict: JobVerdict | None, now: float) -> JobDocument | None:
    """Return the document that the bus should have; None if the object does not parse. now: unix seconds."""
    if snapshot.job is None:
        return None
    meta, own = snapshot.meta, snapshot.own_document
    update: dict[str, object] = {"generation": meta.generation, "verdict": _verdict(snapshot, verdict)}
    update["hold"] = _hold(snapshot, now)
    if own is not None and snapshot.unread_tenant:
        update |= {"tenant": own.tenant, "tenant_weight": own.tenant_weight, "tenant_quota": own.tenant_quota}
    elif snapshot.unread_tenant:
        update["tenant"] = snapshot.unread_tenant
    tenants = (snapshot.tenant,) if snapshot.tenant is not None else ()
    return job_document(snapshot.job, tenants, meta.uid, None, meta.created_at).model_copy(update=update)


def _hold(snapshot: JobSnapshot, now: float) -> JobHold | None:
    """Return the hold to publish: a job whose pods are refused frees its slots, and is tried again after a time that doubles."""
    own, progress = snapshot.own_document, snapshot.own_progress
    known = own.hold if own is not None else None
    if own is None or any(pod.ready for pod in snapshot.pods):
        return None
    if known is not None and known.active and 0 < known.until - now <= LONGEST_HOLD_S:  # longer: the clock was set back
        return known
    cause = _start_refusal(snapshot)
    if cause and progress is not None and progress.admitted and not progress.phase.final:
        num = known.num + 1 if known is not None else 1
        wait_s = min(FIRST_HOLD_S * 2 ** min(num - 1, 20), LONGEST_HOLD_S)
        text = f"{cause}; its adapter slots are free for other jobs, and it is tried again in {round(wait_s / 60)} min"
        return JobHold(reason=Reason.POD_REFUSED, message=text, until=now + wait_s, num=num)
    return known.model_copy(update={"active": False}) if known is not None else None


def _start_refusal(snapshot: JobSnapshot) -> str:
    """Return why the API server refuses an object of a sandbox, or its pods, of which there are none; empty if it does not."""
    if snapshot.is_refused:
        return snapshot.refusal
    fault = refusal_of(snapshot.owned.get(("Deployment", sandbox_name(snapshot.meta.name))))
    return fault.message if fault is not None and not snapshot.pods else ""


def _verdict(snapshot: JobSnapshot, found: JobVerdict | None) -> JobVerdict | None:
    """Return the verdict to publish: the first one is kept.

    It is dropped if it no longer applies (a limit was raised) while the job is still admitted and running.
    """
    own, progress = snapshot.own_document, snapshot.own_progress
    given = own.verdict if own is not None else None
    is_undecided = progress is not None and progress.admitted and not progress.phase.final
    return found if given is None or (found is None and is_undecided) else given


def publish_document(snapshot: JobSnapshot, wanted: JobDocument | None) -> WriteDocument | None:
    """Return the write that brings the document up to date.

    None if it is up to date, refused or unreadable, or the bus is unavailable or was not read yet. A document of an earlier
    job of the same name is not overwritten: it is marked as deleted, so that the orchestrator first forgets
    that job.
    """
    published = snapshot.document
    if not snapshot.bus.synced or not snapshot.bus.available or snapshot.unreadable:
        return None
    if published is not None and published.uid != snapshot.meta.uid:
        return forget(published)
    if wanted is None or wanted == published or refused(snapshot) is not None:
        return None
    if published is None and is_over(snapshot):
        return None
    return WriteDocument(wanted, published)


def forget(document: JobDocument) -> WriteDocument | None:
    """Return the write that marks a document as deleted; None if it is marked already.

    The orchestrator then stops the job and forgets it.
    """
    return None if document.deleted else WriteDocument(document.model_copy(update={"deleted": True}), document)


@dataclass(frozen=True, slots=True)
class StatusSummary:
    """Phase, reason and message of a job. phase None: unchanged."""

    phase: Phase | None
    reason: str
    message: str


def status_summary(snapshot: JobSnapshot, now: float) -> StatusSummary | None:
    """Return the summary of a job; None if there is no new information."""
    progress = snapshot.own_progress
    if progress is not None and not progress.phase.final and snapshot.hold is not None:
        return StatusSummary(Phase.QUEUED, snapshot.hold.reason, snapshot.hold.message)
    if progress is not None:
        return (
            _fault(snapshot, progress, now)
            or _unparsed(snapshot, progress)
            or _cut_off(snapshot, progress)
            or _activity(snapshot, progress)
        )
    if is_over(snapshot):
        return None
    if snapshot.unreadable:
        return StatusSummary(None, Reason.UNREADABLE, _unreadable_text(snapshot))
    refusal = refused(snapshot)
    if refusal is not None:
        return StatusSummary(refusal.phase, refusal.reason, refusal.message)
    if _is_lost(snapshot, now):
        return StatusSummary(None, Reason.BUS_UNAVAILABLE, _BUS)
    if snapshot.refusal:
        return StatusSummary(None, snapshot.refusal_reason, snapshot.refusal)
    if not snapshot.bus.synced or now - snapshot.first_seen_at < FIRST_WORD_S:
        return None
    return StatusSummary(None, Reason.WAITING_FOR_ORCHESTRATOR, "the orchestrator has not read the job yet")


def _unreadable_text(snapshot: JobSnapshot) -> str:
    return f"{snapshot.unreadable}; the job keeps what it has, and nothing is deleted"


def look_again_s(snapshot: JobSnapshot, now: float) -> float | None:
    """Return the seconds until the summary may change by time alone; None if it does not."""
    waits = []
    if snapshot.own_progress is None and not snapshot.status:
        waits.append(snapshot.first_seen_at + FIRST_WORD_S - now)
    if snapshot.hold is not None:
        waits.append(snapshot.hold.until - now)
    if not snapshot.bus.available:
        waits.append(snapshot.bus.since + BUS_PATIENCE_S - now)
    if snapshot.bus.leaderless_since is not None:
        waits.append(snapshot.bus.leaderless_since + LEADER_PATIENCE_S - now)
    return min((wait for wait in waits if wait > 0), default=None)


def _is_lost(snapshot: JobSnapshot, now: float) -> bool:
    return not snapshot.bus.available and now - snapshot.bus.since >= BUS_PATIENCE_S


def _fault(snapshot: JobSnapshot, progress: Progress, now: float) -> StatusSummary | None:
    """Return the fault that stops a job; it takes precedence over the orchestrator's reason.

    Faults of the bus count for every job that has not ended; others only for admitted jobs and those that wait
    for their pool.
    """
    if progress.phase.final:
        return None
    if snapshot.refusal and snapshot.refusal_reason == Reason.BUS_UNAVAILABLE:
        return StatusSummary(progress.phase, snapshot.refusal_reason, snapshot.refusal)
    if not (progress.admitted or progress.reason == Reason.WAITING_FOR_POOL):
        return None
    if snapshot.unreadable:
        return StatusSummary(progress.phase, Reason.UNREADABLE, _unreadable_text(snapshot))
    if progress.admitted and _is_lost(snapshot, now):
        return StatusSummary(progress.phase, Reason.BUS_UNAVAILABLE, _BUS)
    fault = sandbox_fault(snapshot) if progress.admitted else None
    for one in snapshot.serving_pools:
        fault = fault or first_fault(_without_substitute(one.pods), f" of pool {one.name}")
    if fault is not None:
        return StatusSummary(progress.phase, fault.reason, fault.message)
    return _absent(snapshot, progress, now) if progress.admitted and snapshot.job is not None else None


def _unparsed(snapshot: JobSnapshot, progress: Progress) -> StatusSummary | None:
    """Return the summary for an object that no longer parses although its document is published."""
    if snapshot.job is not None or progress.phase.final:
        return None
    text = f"{snapshot.problem}; until this is corrected, the job continues with its last valid spec"
    return StatusSummary(progress.phase, Reason.INVALID_SPEC, text)


def _cut_off(snapshot: JobSnapshot, progress: Progress) -> StatusSummary | None:
    """Return the summary for a job whose egress the installation closed after it was published."""
    if not snapshot.closed_egress or progress.phase.final:
        return None
    text = f"{_closed(snapshot)}; the job continues without it"
    return StatusSummary(progress.phase, Reason.EGRESS_NOT_ALLOWED, text)


def _absent(snapshot: JobSnapshot, progress: Progress, now: float) -> StatusSummary | None:
    """Return the summary if no orchestrator or no worker of a role is ready, without a known fault; else None."""
    since = snapshot.bus.leaderless_since
    if since is not None and now - since >= LEADER_PATIENCE_S:
        return StatusSummary(progress.phase, Reason.WAITING_FOR_ORCHESTRATOR, _LEADER)
    late = late_worker(snapshot.serving_pools)
    return None if late is None else StatusSummary(progress.phase, *late)


def _without_substitute(pods: Sequence[PodFacts]) -> list[PodFacts]:
    """Return the pods of roles without a ready worker: the fault of one worker stops no job while others of its role serve."""
    serving = {pod.component for pod in pods if pod.ready and not pod.deleting}
    return [pod for pod in pods if pod.component not in serving]


def late_worker(pools: Iterable[JobPool]) -> tuple[Reason, str] | None:
    """Return the first role of a pool without a ready worker, as reason and message; None if each role has one."""
    roles = (("rollout", Reason.ROLLOUT_STARTING), ("trainer", Reason.TRAINER_STARTING))
    for pool, (role, reason) in itertools.product(pools, roles):
        mine = [pod for pod in pool.pods if pod.component == role and not pod.deleting]
        if not any(pod.ready for pod in mine):
            first = min((pod.name for pod in mine), default="")
            awaited = f"{first} of pool {pool.name} is starting"
            awaited = awaited if first else f"pool {pool.name} has no {role} worker yet"
            return reason, f"{awaited}; the job continues when it is ready"
    return None


def sandbox_fault(snapshot: JobSnapshot) -> PodFault | None:
    """Return the sandbox's fault: a refused action, a fault of its pods, or pods that its Deployment may not create."""
    if snapshot.refusal:
        return PodFault(snapshot.refusal_reason, snapshot.refusal)
    workload = snapshot.owned.get(("Deployment", sandbox_name(snapshot.meta.name)))
    return first_fault(snapshot.pods) or refusal_of(workload)


def _activity(snapshot: JobSnapshot, progress: Progress) -> StatusSummary:
    busy = progress.reason in (Reason.ADMITTED, Reason.TRAINING, Reason.EVALUATING)
    if progress.admitted and busy and not any(pod.ready for pod in snapshot.pods):
        return StatusSummary(progress.phase, Reason.SANDBOX_STARTING, "its sandbox is starting")
    late = late_worker(snapshot.serving_pools)
    misfit = unfit_now(snapshot) if progress.reason == Reason.WAITING_FOR_POOL else None
    if misfit is not None:
        return StatusSummary(misfit.phase, misfit.reason, misfit.message)
    if progress.reason == Reason.WAITING_FOR_POOL and late is not None:
        return StatusSummary(progress.phase, progress.reason, f"{progress.message}: {late[1]}")
    return StatusSummary(progress.phase, progress.reason, progress.message)
