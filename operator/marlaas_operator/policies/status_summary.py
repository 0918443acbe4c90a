"""Phase, reason and message of a job: the first fault, else the current wait or activity.

The orchestrator decides the job's phase. The operator adds what only it observes: missing objects, pods that
are not ready, an unavailable bus. Incomplete observations leave the status unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from marlaas_api.messages import Phase, Progress
from marlaas_api.reasons import Reason
from marlaas_operator.pod_facts import PodFacts
from marlaas_operator.policies.document_publishing import is_over, outgrown, refused
from marlaas_operator.policies.faults import PodFault, first_fault, refusal_of
from marlaas_operator.snapshot import JobSnapshot

BUS_PATIENCE_S = 10.0
"""Unavailability of the bus that is not reported: a restart takes less."""
LEADER_PATIENCE_S = 3.0
"""Time for a new orchestrator to take the lease, which itself expires 10 s after the last renewal."""
FIRST_WORD_S = 2.0
"""Wait of a new job's first status for the orchestrator, so that a queued job costs one patch."""


@dataclass(frozen=True, slots=True)
class StatusSummary:
    """Phase, reason and message of a job. phase None: unchanged."""

    phase: Phase | None
    reason: str
    message: str


def status_summary(snapshot: JobSnapshot, sandbox: str, now: float) -> StatusSummary | None:
    """Return the summary of a job; None if there is no new information. sandbox: name of its Deployment."""
    progress = snapshot.own_progress
    if progress is not None:
        return _trouble(snapshot, progress, sandbox, now) or _unread(snapshot, progress) or _doing(snapshot, progress)
    if is_over(snapshot) or snapshot.progress_unread:
        return None
    hold = refused(snapshot)
    if hold is not None:
        return StatusSummary(hold.phase, hold.reason, hold.message)
    if _is_lost(snapshot, now):
        return StatusSummary(None, Reason.BUS_UNAVAILABLE, _BUS)
    if snapshot.refusal:
        return StatusSummary(None, snapshot.refusal_reason, snapshot.refusal)
    if not snapshot.bus.synced or now - snapshot.first_seen_at < FIRST_WORD_S:
        return None
    return StatusSummary(None, Reason.WAITING_FOR_ORCHESTRATOR, "the orchestrator has not spoken of the job yet")


def look_again_s(snapshot: JobSnapshot, now: float) -> float | None:
    """Return the seconds until the summary may change by time alone; None if it does not."""
    waits = []
    if snapshot.own_progress is None and not snapshot.status:
        waits.append(snapshot.first_seen_at + FIRST_WORD_S - now)
    if not snapshot.bus.available:
        waits.append(snapshot.bus.since + BUS_PATIENCE_S - now)
    if snapshot.bus.leaderless_since is not None:
        waits.append(snapshot.bus.leaderless_since + LEADER_PATIENCE_S - now)
    return min((wait for wait in waits if wait > 0), default=None)


_LEADER = "no orchestrator is at work; what it has given out is played and trained, and nothing is lost"
_BUS = "NATS does not answer; what runs goes on as far as it can, and nothing is lost"


def _is_lost(snapshot: JobSnapshot, now: float) -> bool:
    return not snapshot.bus.available and now - snapshot.bus.since >= BUS_PATIENCE_S


def _trouble(snapshot: JobSnapshot, progress: Progress, sandbox: str, now: float) -> StatusSummary | None:
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
    if progress.admitted and _is_lost(snapshot, now):
        return StatusSummary(progress.phase, Reason.BUS_UNAVAILABLE, _BUS)
    fault = sandbox_fault(snapshot, sandbox) if progress.admitted else None
    fault = fault or first_fault(snapshot.pool_pods, f" of pool {_pool_name(snapshot)}")
    if fault is not None:
        return StatusSummary(progress.phase, fault.reason, fault.message)
    return _absent(snapshot, progress, now) if progress.admitted and snapshot.job is not None else None


def _unread(snapshot: JobSnapshot, progress: Progress) -> StatusSummary | None:
    """Return the summary for an object that no longer parses although its document is published."""
    if snapshot.job is not None or progress.phase.final:
        return None
    text = f"{snapshot.problem}; until that is corrected, the job goes on as it was when it was valid"
    return StatusSummary(progress.phase, Reason.INVALID_SPEC, text)


def _absent(snapshot: JobSnapshot, progress: Progress, now: float) -> StatusSummary | None:
    """Return the summary if no orchestrator or no worker of a role is ready, without a known fault; else None."""
    since = snapshot.bus.leaderless_since
    if since is not None and now - since >= LEADER_PATIENCE_S:
        return StatusSummary(progress.phase, Reason.WAITING_FOR_ORCHESTRATOR, _LEADER)
    late = late_worker(snapshot.pool_pods, _pool_name(snapshot))
    return None if late is None else StatusSummary(progress.phase, *late)


def late_worker(pods: Sequence[PodFacts], pool: str) -> tuple[Reason, str] | None:
    """Return the first role without a ready worker, as reason and message; None if each role has one."""
    for role, reason in (("rollout", Reason.ROLLOUT_STARTING), ("trainer", Reason.TRAINER_STARTING)):
        mine = [pod for pod in pods if pod.component == role and not pod.deleting]
        if not any(pod.ready for pod in mine):
            first = min((pod.name for pod in mine), default="")
            awaited = f"{first} of pool {pool} is starting" if first else f"pool {pool} has no {role} worker yet"
            return reason, f"{awaited}; the job goes on when it serves"
    return None


def sandbox_fault(snapshot: JobSnapshot, sandbox: str) -> PodFault | None:
    """Return the sandbox's fault: a refused action, a fault of its pods, or pods that its Deployment may not create."""
    if snapshot.refusal:
        return PodFault(snapshot.refusal_reason, snapshot.refusal)
    return first_fault(snapshot.pods) or refusal_of(snapshot.owned.get(("Deployment", sandbox)))


def _doing(snapshot: JobSnapshot, progress: Progress) -> StatusSummary:
    busy = progress.reason in (Reason.ADMITTED, Reason.TRAINING, Reason.EVALUATING)
    if progress.admitted and busy and not any(pod.ready for pod in snapshot.pods):
        return StatusSummary(progress.phase, Reason.SANDBOX_STARTING, "its sandbox is starting")
    late = late_worker(snapshot.pool_pods, _pool_name(snapshot))
    misfit = outgrown(snapshot) if progress.reason == Reason.WAITING_FOR_POOL else None
    if misfit is not None:
        return StatusSummary(misfit.phase, misfit.reason, misfit.message)
    if progress.reason == Reason.WAITING_FOR_POOL and late is not None:
        return StatusSummary(progress.phase, progress.reason, f"{progress.message}: {late[1]}")
    return StatusSummary(progress.phase, progress.reason, progress.message)


def _pool_name(snapshot: JobSnapshot) -> str:
    return snapshot.document.pool if snapshot.document is not None else ""
