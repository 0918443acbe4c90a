"""What is handed to the orchestrator of a job: its document, and why there may be none. The orchestrator decides admission; this does not.

A document that stands is kept: a pool that is changed or gone later is no reason to stop a job that runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from marlaas_api.documents import job_document
from marlaas_api.kinds import ModelPool, RLJob
from marlaas_api.kinds.checks import check_fit, check_supported
from marlaas_api.kinds.problems import Problem
from marlaas_api.messages import JobDocument, Phase, Verdict
from marlaas_api.reasons import Reason
from marlaas_operator.plan import WriteDocument
from marlaas_operator.snapshot import JobSnapshot


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job is not handed over. phase None: as it was; Failed is for good."""

    phase: Phase | None
    reason: Reason
    message: str


def refused(snapshot: JobSnapshot) -> Refusal | None:
    """Why the job has no document; None if it has one, or may have one, which a bus that was not read yet may hold."""
    if snapshot.own_document is not None or not snapshot.bus.synced:
        return None
    if snapshot.job is None:
        return Refusal(None, Reason.INVALID_SPEC, snapshot.problem)
    if snapshot.pool is None or snapshot.pool_deleting:
        absent = f"cannot be read ({snapshot.pool_problem})" if snapshot.pool_problem else "does not exist"
        state = "is being deleted" if snapshot.pool is not None else absent
        text = f"ModelPool '{snapshot.job.spec.pool_ref.name}' {state}; the job begins when there is one of this name"
        return Refusal(Phase.QUEUED, Reason.POOL_NOT_FOUND, text)
    problems = tuple(_problems(snapshot.job, snapshot.pool))
    if problems:
        return Refusal(Phase.FAILED, problems[0][0], "; ".join(str(problem) for _, problem in problems))
    if snapshot.document is not None:
        text = "an earlier job of the same name is being cleaned up; this one begins when that is done"
        return Refusal(Phase.QUEUED, Reason.WAITING_FOR_ORCHESTRATOR, text)
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


def _problems(job: RLJob, pool: ModelPool) -> Iterator[tuple[Reason, Problem]]:
    for problem in check_supported(job):
        yield Reason.UNSUPPORTED, problem
    for problem in check_fit(job, pool):
        foreign = problem.loc[0] == "metadata"
        yield (Reason.NAMESPACE_NOT_ALLOWED if foreign else Reason.NEVER_FITS), problem


def wanted_document(snapshot: JobSnapshot, verdict: Verdict | None) -> JobDocument | None:
    """The document as it should stand; None if the object does not parse. A verdict that was given stands."""
    if snapshot.job is None:
        return None
    own = snapshot.own_document
    given = own.verdict if own is not None else None
    update: dict[str, object] = {"generation": snapshot.meta.generation, "verdict": given or verdict}
    if own is not None and snapshot.tenant_unread:
        update |= {"tenant": own.tenant, "tenant_weight": own.tenant_weight}
    return job_document(snapshot.job, snapshot.tenants, snapshot.meta.uid, None).model_copy(update=update)


def hand_over(snapshot: JobSnapshot, wanted: JobDocument | None) -> WriteDocument | None:
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
