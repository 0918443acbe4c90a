"""Status of an RLJob: the orchestrator's numbers, the summary, and the conditions."""

from collections.abc import Iterator, Mapping
from typing import Any

from marlaas_api.kinds import RLJob
from marlaas_api.messages import JobDocument, Phase, Progress
from marlaas_api.reasons import Reason
from marlaas_operator.manifests.names import sandbox_name
from marlaas_operator.policies.backoff import sandbox_crashes
from marlaas_operator.policies.conditions import ConditionState, clipped, conditions, rfc3339
from marlaas_operator.policies.document_publishing import MISFITS
from marlaas_operator.policies.status_patch import figure, without_none
from marlaas_operator.policies.status_summary import StatusSummary, sandbox_fault
from marlaas_operator.snapshot import JobSnapshot

ADMITTED, SANDBOX_READY, COMPLETE, FAILED = "Admitted", "SandboxReady", "Complete", "Failed"
_FIGURES = (
    *("progress", "step", "steps", "agents", "reward", "evalBefore", "evalLast", "staleness"),
    *("tokens", "tokensPerSecond", "acceleratorSeconds", "faults", "trainingFaults", "startedAt"),
)


def job_status(snapshot: JobSnapshot, told: StatusSummary, wanted: JobDocument | None, now: float) -> dict[str, Any]:
    """Return the complete status.

    Args:
        told: phase, reason and message.
        wanted: the job's document, which names its tenant; None keeps the stored tenant.
        now: unix seconds.
    """
    before: Mapping[str, Any] = snapshot.status or {}
    phase = told.phase or Phase(before.get("phase") or Phase.QUEUED)
    progress = snapshot.own_progress
    figures = _figures(snapshot.job, progress) if progress is not None else {k: before.get(k) for k in _FIGURES}
    status = {
        "observedGeneration": snapshot.meta.generation,
        "phase": str(phase),
        "reason": str(told.reason) or None,
        "message": clipped(told.message) or None,
        "tenant": wanted.tenant if wanted is not None else before.get("tenant"),
        **figures,
        "sandboxCrashes": sandbox_crashes(snapshot) or None,
        "finishedAt": _finished_at(progress, before, now) if phase.final else None,
        "conditions": conditions(
            _findings(snapshot, told, phase), before.get("conditions") or (), snapshot.meta.generation, now
        ),
    }
    return without_none(status)


def _figures(job: RLJob | None, progress: Progress) -> dict[str, Any]:
    return {
        "progress": f"{progress.step}/{progress.steps}",
        "step": progress.step,
        "steps": progress.steps,
        "agents": [_agent(name, progress) for name in _agents(job, progress)],
        "reward": figure(progress.reward, 3),
        "evalBefore": figure(progress.eval_before, 3),
        "evalLast": figure(progress.eval_last, 3),
        "staleness": figure(progress.staleness, 3),
        "tokens": progress.tokens,
        "tokensPerSecond": figure(progress.tokens_per_s, 1),
        "acceleratorSeconds": figure(progress.accelerator_s, 1),
        "faults": dict(progress.faults) or None,
        "trainingFaults": dict(progress.training_faults) or None,
        "startedAt": rfc3339(progress.started_at) if progress.started_at is not None else None,
    }


def _agents(job: RLJob | None, progress: Progress) -> list[str]:
    return [agent.name for agent in job.spec.agents] if job is not None else sorted(progress.versions)


def _agent(name: str, progress: Progress) -> dict[str, Any]:
    return without_none(
        {
            "name": name,
            "policyVersion": progress.versions.get(name),
            "promotedVersion": progress.promoted.get(name),
            "adapter": progress.adapters.get(name),
        }
    )


def _finished_at(progress: Progress | None, before: Mapping[str, Any], now: float) -> str:
    if progress is not None and progress.finished_at is not None:
        return rfc3339(progress.finished_at)
    return str(before.get("finishedAt") or rfc3339(now))


def _findings(snapshot: JobSnapshot, told: StatusSummary, phase: Phase) -> Iterator[ConditionState]:
    yield _admitted(snapshot, told, phase)
    yield _sandbox_ready(snapshot, told, phase)
    seen = {condition.get("type") for condition in (snapshot.status or {}).get("conditions") or ()}
    for type_, final in ((COMPLETE, Phase.SUCCEEDED), (FAILED, Phase.FAILED)):
        if phase is final or type_ in seen:
            yield ConditionState(type_, phase is final, told.reason, told.message)


def _admitted(snapshot: JobSnapshot, told: StatusSummary, phase: Phase) -> ConditionState:
    progress = snapshot.own_progress
    if told.reason == Reason.DELETING:
        return ConditionState(ADMITTED, False, Reason.DELETING, told.message)
    if phase.final:
        return ConditionState(ADMITTED, False, Reason.FINISHED, "the job has ended and holds nothing")
    if progress is None:
        return ConditionState(ADMITTED, False, told.reason, told.message)
    if progress.admitted:
        return ConditionState(ADMITTED, True, Reason.ADMITTED, "the job holds its adapter slots")
    said = told if told.reason in MISFITS else progress
    return ConditionState(ADMITTED, False, said.reason, said.message)


def _sandbox_ready(snapshot: JobSnapshot, told: StatusSummary, phase: Phase) -> ConditionState:
    progress = snapshot.own_progress
    if told.reason == Reason.DELETING:
        return ConditionState(SANDBOX_READY, False, Reason.DELETING, told.message)
    if phase.final:
        return ConditionState(SANDBOX_READY, False, Reason.FINISHED, "the job has ended")
    spec = snapshot.job_spec
    if progress is None or not progress.admitted or spec is None:
        return ConditionState(SANDBOX_READY, False, Reason.NOT_ADMITTED, "a job has sandboxes once it is admitted")
    wanted = spec.environment.replicas
    ready = min(wanted, sum(pod.ready and not pod.deleting for pod in snapshot.pods))
    counted = f"{ready} of {wanted} sandboxes are ready"
    if ready == wanted:
        return ConditionState(SANDBOX_READY, True, Reason.SANDBOX_READY, counted)
    fault = sandbox_fault(snapshot, sandbox_name(snapshot.meta.name))
    if fault is not None:
        return ConditionState(SANDBOX_READY, False, fault.reason, f"{counted}; {fault.message}")
    return ConditionState(SANDBOX_READY, False, Reason.SANDBOX_STARTING, counted)
