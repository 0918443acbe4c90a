"""What is handed to the orchestrator of a job: its document, and why there may be none. The orchestrator decides admission; this does not.

A document that stands is kept: a pool that is changed or gone later is no reason to stop a job that runs. What can never fit is judged here, by the
pool's spec, and judged anew whenever the pool changes: a job may have come a moment before its pool's update, so it waits, loudly. Only what no
change of a pool could cure is for good.
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
"""Why a job waits although its pool is there: the pool's spec does not offer what the job asks for."""


@dataclass(frozen=True, slots=True)
class PublishRefusal:
    """Why a job is not handed over. phase None: as it was; Queued: until the cause is gone; Failed: for good."""

    phase: Phase | None
    reason: Reason
    message: str


def refused(snapshot: JobSnapshot) -> PublishRefusal | None:
    """Why the job has no document; None if it has one, or may have one, which a bus that was not read yet may hold."""
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
    """Whether the stored status is final and the bus knows nothing (any more) that would contradict it: what has ended is not begun again because the
    bus has lost its memory. A succeeded job that was given more steps is not over."""
    status = snapshot.status or {}
    if snapshot.own_progress is not None:
        return False
    if status.get("phase") == Phase.SUCCEEDED and snapshot.job is not None:
        return snapshot.job.spec.training.steps <= int(status.get("step") or 0)
    return status.get("phase") in (Phase.SUCCEEDED, Phase.FAILED)


def outgrown(snapshot: JobSnapshot) -> PublishRefusal | None:
    """Why a job that has its document and waits for its pool cannot get in as the pool's spec is now; None if it can, or there is no pool."""
    if snapshot.job is None or snapshot.pool is None:
        return None
    return _misfit(snapshot.job, snapshot.pool)


def _misfit(job: RLJob, pool: ModelPool) -> PublishRefusal | None:
    """What the pool's spec does not offer the job; None if the job fits."""
    problems = tuple(check_fit(job, pool))
    if not problems:
        return None
    foreign = problems[0].loc[0] == "metadata"
    text = f"{_sentences(problems)}. The job begins if the pool is changed so that it fits"
    return PublishRefusal(Phase.QUEUED, Reason.NAMESPACE_NOT_ALLOWED if foreign else Reason.NEVER_FITS, text)


def _sentences(problems: Iterable[Problem]) -> str:
    return "; ".join(str(problem) for problem in problems)


def wanted_document(snapshot: JobSnapshot, verdict: JobVerdict | None) -> JobDocument | None:
    """The document as it should stand; None if the object does not parse."""
    if snapshot.job is None:
        return None
    meta, own = snapshot.meta, snapshot.own_document
    update: dict[str, object] = {"generation": meta.generation, "verdict": _verdict(snapshot, verdict)}
    if own is not None and snapshot.tenant_unread:
        update |= {"tenant": own.tenant, "tenant_weight": own.tenant_weight}
    return job_document(snapshot.job, snapshot.tenants, meta.uid, None, meta.created_at).model_copy(update=update)


def _verdict(snapshot: JobSnapshot, found: JobVerdict | None) -> JobVerdict | None:
    """The verdict that stands: the one that was given first, unless the job still runs and a raised limit has taken its ground away."""
    own, progress = snapshot.own_document, snapshot.own_progress
    given = own.verdict if own is not None else None
    is_undecided = progress is not None and progress.admitted and not progress.phase.final
    return found if given is None or (found is None and is_undecided) else given


def publish_document(snapshot: JobSnapshot, wanted: JobDocument | None) -> WriteDocument | None:
    """The write that makes the document stand; None if it does, may not, or cannot be known.

    A document that an earlier job of this name has left is not overwritten: the orchestrator first forgets that job.
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
    """Ask the orchestrator to stop a job and forget it; None if it was asked already."""
    return None if document.deleted else WriteDocument(document.model_copy(update={"deleted": True}), document)
