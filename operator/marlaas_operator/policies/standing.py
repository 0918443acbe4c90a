"""Where a job stands, in a phase, one reason and one sentence: the first of what is wrong, what it waits for, what it does.

The orchestrator decides what becomes of a job. The operator adds what only it sees: objects that are not there, pods that do not serve, a bus that is
away. Nothing is said on a mere suspicion: what is not known yet leaves the status as it was.
"""

from dataclasses import dataclass

from marlaas_api.messages import Phase, Progress
from marlaas_api.reasons import Reason
from marlaas_operator.policies.faults import PodFault, first_fault, refusal_of
from marlaas_operator.policies.handover import is_over, refused
from marlaas_operator.snapshot import JobSnapshot

BUS_PATIENCE_S = 10.0
"""A bus that is away for less is a restart."""
FIRST_WORD_S = 2.0
"""How long a new job's first status waits for the orchestrator, so that a queued job costs one patch."""


@dataclass(frozen=True, slots=True)
class Standing:
    """phase None: as it was."""

    phase: Phase | None
    reason: str
    message: str


def standing(snapshot: JobSnapshot, sandbox: str, now: float) -> Standing | None:
    """What to tell of a job; None: nothing new is known. sandbox: name of its Deployment."""
    progress = snapshot.own_progress
    if progress is not None:
        return _trouble(snapshot, progress, sandbox, now) or _doing(snapshot, progress)
    if is_over(snapshot):
        return None
    hold = refused(snapshot)
    if hold is not None:
        return Standing(hold.phase, hold.reason, hold.message)
    if _is_lost(snapshot, now):
        return Standing(None, Reason.BUS_UNAVAILABLE, _BUS)
    if not snapshot.bus.synced or now - snapshot.first_seen_at < FIRST_WORD_S:
        return None
    return Standing(None, Reason.WAITING_FOR_ORCHESTRATOR, "the orchestrator has not spoken of the job yet")


def look_again_s(snapshot: JobSnapshot, now: float) -> float | None:
    """Seconds until the clock alone may change what is told."""
    waits = []
    if snapshot.own_progress is None and not snapshot.status:
        waits.append(snapshot.first_seen_at + FIRST_WORD_S - now)
    if not snapshot.bus.available:
        waits.append(snapshot.bus.since + BUS_PATIENCE_S - now)
    return min((wait for wait in waits if wait > 0), default=None)


_BUS = "NATS does not answer; what runs goes on as far as it can, and nothing is lost"


def _is_lost(snapshot: JobSnapshot, now: float) -> bool:
    return not snapshot.bus.available and now - snapshot.bus.since >= BUS_PATIENCE_S


def _trouble(snapshot: JobSnapshot, progress: Progress, sandbox: str, now: float) -> Standing | None:
    """What keeps a job from going on; it beats what the orchestrator says of a job that holds slots, or waits for the very pool."""
    if progress.phase.final or not (progress.admitted or progress.reason == Reason.WAITING_FOR_POOL):
        return None
    if progress.admitted and _is_lost(snapshot, now):
        return Standing(progress.phase, Reason.BUS_UNAVAILABLE, _BUS)
    fault = sandbox_fault(snapshot, sandbox) if progress.admitted else None
    fault = fault or first_fault(snapshot.pool_pods, f" of pool {_pool_name(snapshot)}")
    return None if fault is None else Standing(progress.phase, fault.reason, fault.message)


def sandbox_fault(snapshot: JobSnapshot, sandbox: str) -> PodFault | None:
    """What is wrong with the sandbox, as its pods or those who refuse them say."""
    if snapshot.refusal:
        return PodFault(Reason.POD_REFUSED, snapshot.refusal)
    return first_fault(snapshot.pods) or refusal_of(snapshot.owned.get(("Deployment", sandbox)))


def _doing(snapshot: JobSnapshot, progress: Progress) -> Standing:
    busy = progress.reason in (Reason.ADMITTED, Reason.TRAINING, Reason.EVALUATING)
    if progress.admitted and busy and not any(pod.ready for pod in snapshot.pods):
        return Standing(progress.phase, Reason.SANDBOX_STARTING, "its sandbox is starting")
    return Standing(progress.phase, progress.reason, progress.message)


def _pool_name(snapshot: JobSnapshot) -> str:
    return snapshot.document.pool if snapshot.document is not None else ""
