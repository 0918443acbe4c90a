"""Publication of a job's document to the orchestrator, and the reasons to refuse it.

The orchestrator decides admission. A published document is kept: a later change or deletion of the pool does
not stop a running job. A job that does not fit its pool's spec stays queued with a reason, and is checked again
whenever the pool changes: the job may have been created just before the pool's update. A job fails for good
only if no change of a pool could help.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from marlaas_api.documents import job_document
from marlaas_api.kinds import ModelPool, RLJob
from marlaas_api.kinds.checks import check_fit, check_supported
from marlaas_api.kinds.problems import Problem
from marlaas_api.messages import JobDocument, JobVerdict, Phase
from marlaas_api.reasons import Reason
from marlaas_operator.plan import WriteDocument
from marlaas_operator.snapshot import JobSnapshot

MISFITS = frozenset({Reason.NEVER_FITS, Reason.NAMESPACE_NOT_ALLOWED})
"""Reasons to queue a job although its pool exists: the pool's spec does not allow what the job requests."""


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
    if snapshot.own_document is not None or not snapshot.bus.synced:
        return None
    if snapshot.job is None:
        return PublishRefusal(None, Reason.INVALID_SPEC, snapshot.problem)
    unsupported = tuple(check_supported(snapshot.job))
    if unsupported:
        return PublishRefusal(Phase.FAILED, Reason.UNSUPPORTED, _sentences(unsupported))
    if snapshot.pool is None or snapshot.pool_deleting:
        absent = f"cannot be read ({snapshot.pool_problem})" if snapshot.pool_problem else "does not exist"
        state = "is being deleted" if snapshot.pool is not None else absent
        text = f"ModelPool '{snapshot.job.spec.pool_ref.name}' {state}; the job begins when there is one of this name"
        return PublishRefusal(Phase.QUEUED, Reason.POOL_NOT_FOUND, text)
    misfit = _misfit(snapshot.job, snapshot.pool)
    if misfit is not None:
        return misfit
    if snapshot.document is not None:
        text = "an earlier job of the same name is being cleaned up; this one begins when that is done"
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


def outgrown(snapshot: JobSnapshot) -> PublishRefusal | None:
    """Return why a job with a published document no longer fits the pool's spec.

    None if it fits, or if there is no pool.
    """
    if snapshot.job is None or snapshot.pool is None:
        return None
    return _misfit(snapshot.job, snapshot.pool)


def _misfit(job: RLJob, pool: ModelPool) -> PublishRefusal | None:
    """Return what the pool's spec does not allow; None if the job fits."""
    problems = tuple(check_fit(job, pool))
    if not problems:
        return None
    foreign = problems[0].loc[0] == "metadata"
    text = f"{_sentences(problems)}. The job begins if the pool is changed so that it fits"
    return PublishRefusal(Phase.QUEUED, Reason.NAMESPACE_NOT_ALLOWED if foreign else Reason.NEVER_FITS, text)


def _sentences(problems: Iterable[Problem]) -> str:
    return "; ".join(str(problem) for problem in problems)


def wanted_document(snapshot: JobSnapshot, verdict: JobVerdict | None) -> JobDocument | None:
    """Return the document that the bus should have; None if the object does not parse."""
    if snapshot.job is None:
        return None
    meta, own = snapshot.meta, snapshot.own_document
    update: dict[str, object] = {"generation": meta.generation, "verdict": _verdict(snapshot, verdict)}
    if own is not None and snapshot.tenant_unread:
        update |= {"tenant": own.tenant, "tenant_weight": own.tenant_weight}
    return job_document(snapshot.job, snapshot.tenants, meta.uid, None, meta.created_at).model_copy(update=update)


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

    None if it is up to date, refused, or the bus is unavailable or was not read yet. A document of an earlier
    job of the same name is not overwritten: it is marked as deleted, so that the orchestrator first forgets
    that job.
    """
    stands = snapshot.document
    if not snapshot.bus.synced or not snapshot.bus.available:
        return None
    if stands is not None and stands.uid != snapshot.meta.uid:
        return forget(stands)
    if wanted is None or wanted == stands or refused(snapshot) is not None:
        return None
    if stands is None and is_over(snapshot):
        return None
    return WriteDocument(wanted, stands)


def forget(document: JobDocument) -> WriteDocument | None:
    """Return the write that marks a document as deleted; None if it is marked already.

    The orchestrator then stops the job and forgets it.
    """
    return None if document.deleted else WriteDocument(document.model_copy(update={"deleted": True}), document)
