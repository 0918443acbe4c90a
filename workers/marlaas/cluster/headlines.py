"""Converts an RLJob object of the cluster into a row of the live table of `marlaas run`. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from marlaas.cluster.views import condition, seconds
from marlaas.local.table import JobView
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJob
from marlaas_api.kinds.problems import parse
from marlaas_api.kinds.status import RLJobStatus
from marlaas_api.messages import JobDocument, Phase, Progress


def view(body: Mapping[str, Any], now: float) -> JobView:
    """Return the row; `now` is the time of its progress, in unix seconds. Raises InvalidObject for an object of a newer MARLaaS."""
    job = parse(RLJob, body)
    document = JobDocument(
        namespace=job.metadata.namespace,
        job=job.metadata.name,
        uid=job.metadata.uid or "",
        generation=job.metadata.generation,
        pool=job.spec.pool_ref.name,
        tenant=(job.status.tenant if job.status is not None else None) or job.metadata.namespace,
        spec=job_spec(job.spec),
    )
    return JobView(document, _progress(document, job.status, now))


def headline(views: Sequence[JobView]) -> str:
    """Return the line above the table: the number of jobs per phase, and the reason of the first job that waits or has a fault."""
    phases = [progress.phase.value if (progress := one.progress) else "Starting" for one in views]
    counts = ", ".join(f"{phases.count(phase)} {phase.lower()}" for phase in dict.fromkeys(phases))
    stuck = next((one for one in views if _is_stuck(one)), None)
    if stuck is None or stuck.progress is None:
        return counts
    return f"{counts} · {stuck.name}: {stuck.progress.reason}: {stuck.progress.message.splitlines()[-1]}"


def _is_stuck(one: JobView) -> bool:
    progress = one.progress
    waits = progress is not None and progress.phase in (Phase.QUEUED, Phase.SUSPENDED)
    ails = progress is not None and progress.phase is Phase.RUNNING and progress.reason not in ("Admitted", "Training")
    return progress is not None and bool(progress.message) and (waits or ails)


def _progress(document: JobDocument, status: RLJobStatus | None, now: float) -> Progress | None:
    if status is None or status.phase is None:
        return None
    admitted = condition(status, "Admitted")
    return Progress(
        namespace=document.namespace,
        job=document.job,
        uid=document.uid,
        generation=status.observed_generation or document.generation,
        phase=Phase(status.phase),
        admitted=admitted is not None and admitted.status == "True",
        reason=status.reason or "",
        message=status.message or "",
        step=status.step or 0,
        steps=status.steps or document.spec.training.steps,
        versions={agent.name: agent.policy_version for agent in status.agents if agent.policy_version is not None},
        reward=status.reward,
        eval_before=status.eval_before,
        eval_last=status.eval_last,
        staleness=status.staleness or 0.0,
        tokens=status.tokens or 0,
        tokens_per_s=status.tokens_per_second or 0.0,
        accelerator_s=status.accelerator_seconds or 0.0,
        faults=dict(status.faults or {}),
        training_faults=dict(status.training_faults or {}),
        started_at=seconds(status.started_at),
        finished_at=seconds(status.finished_at),
        at=now,
    )
