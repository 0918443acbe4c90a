"""State of a job of a run on this machine, for `marlaas why --run DIR`: from the running `marlaas run`, or as it was left."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from marlaas.cli.running import named_job
from marlaas.cluster.explain import ClusterContext, explain
from marlaas.cluster.views import ClusterJobView
from marlaas.local.changes import RunChange, asked, is_running
from marlaas.local.folder import OutFolder
from marlaas.local.records import OpenedJob, open_jobs
from marlaas.local.table import finite
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds.status import RLJobStatus
from marlaas_api.messages import AgentProgress, JobDocument, Progress
from marlaas_api.reason_texts import NOTHING, ReasonStage, text_of
from marlaas_api.reasons import Reason
from marlaas_api.usage_objects import usage_status

_LOOK = "Wait while it starts. If it lasts, read the logs in {folder}/.state/logs."
_ADVICE: Mapping[str, str] = {
    Reason.FINISHED: "Chat with its adapter: `marlaas chat {folder} --job {job}{agent}`.",
    Reason.SUSPENDED: "To continue from the last committed step, run `marlaas resume {name} --run {folder}`; if the run has ended, repeat its command "
    "with suspend: false in the manifest.",
    Reason.WAITING_FOR_ORCHESTRATOR: _LOOK,
    Reason.WAITING_FOR_POOL: _LOOK,
    Reason.WAITING_FOR_TRAINER: _LOOK,
    "RoleFailed": "Correct the error in the message; when the run has ended, repeat its command.",
    "ResultUnreadable": "Start a run with another --out.",
}
"""Advice for a run, where that of the reasons' table is about a cluster."""


def why_in_run(folder: Path, name: str, namespace: str | None) -> str:
    """Return a paragraph about a job. Raises InvalidInput if the run has no such job, or does not answer."""
    named_job(folder, name, namespace)  # a wrong name is refused before the run is asked
    live = _live(folder)
    opened = named_job(folder, name, namespace)
    jobs = {one.document.uid: one for one in open_jobs(folder)}
    known = {uid: one.progress for uid, one in jobs.items()} if live is None else live
    progress = known.get(opened.document.uid)
    if live is not None or (progress is not None and progress.phase.final):
        return _paragraph(folder, opened, jobs, known, time.time())
    over = f"No `marlaas run` uses {folder} now. To continue the run, repeat the command that started it."
    if progress is None:
        return f"{over} The run ended without writing the state of {opened.name}, of which {len(opened.steps())} steps are recorded."
    return f"{over} As it was left: {_paragraph(folder, opened, jobs, known, progress.at)}"


def _paragraph(
    folder: Path,
    opened: OpenedJob,
    jobs: Mapping[str, OpenedJob],
    known: Mapping[str, Progress | None],
    now: float,
) -> str:
    views = {uid: _view(one, known.get(uid)) for uid, one in jobs.items()}
    job = views.pop(opened.document.uid)
    advice, free = partial(_advice, folder, opened.document), _free_places(opened, [*views.values()])
    return explain(job, ClusterContext(jobs=[*views.values()], advice=advice, free=free), now)


def _free_places(opened: OpenedJob, jobs: Sequence[ClusterJobView]) -> dict[str, int]:
    """Return, by pool of a job, the number of agents that it admits beside those of running jobs."""
    running = [one for one in jobs if one.status is not None and one.status.phase == "Running"]
    free = {}
    for name, pool in opened.pools.items():
        rollout = pool.spec.rollout
        places = pool.spec.adapter_slots * rollout.replicas * rollout.agents_per_slot
        free[name] = places - sum(one.places.get(name, 0) for one in running)
    return free


def _live(folder: Path) -> dict[str, Progress] | None:
    """Return the progress by uid as the run knows it; None if no run uses the folder."""
    out = OutFolder(folder.absolute())
    try:
        if is_running(out):
            return {one.uid: one for one in asked(out, RunChange(asks_progress=True)).progress}
    except InvalidInput:
        if is_running(out):
            raise
    return None


def _advice(folder: Path, document: JobDocument, reason: str) -> str:
    """Return the advice for a reason; empty if there is nothing to do."""
    if reason in _ADVICE:
        policies = document.spec.policies
        agent = f" --agent {policies[0].name}" if len(policies) > 1 else ""
        return _ADVICE[reason].format(folder=folder, name=document.job, job=document.ref, agent=agent)
    text = text_of(reason)
    if text is None or text.advice == NOTHING or "kubectl" in text.advice:
        return ""
    if text.stage is ReasonStage.FAILED:
        new = "start a run with another --out"
        return text.advice.replace("create a new job", new).replace("Create a new job", new.capitalize())
    return text.advice


def _view(opened: OpenedJob, progress: Progress | None) -> ClusterJobView:
    document = opened.document
    return ClusterJobView(
        namespace=document.namespace,
        name=document.job,
        uid=document.uid,
        generation=document.generation,
        pools=tuple(sorted(document.pools)),
        created_at=document.created_at,
        status=RLJobStatus.model_validate(_status(opened, progress)),
        policies={agent.name: agent.trainable for agent in document.spec.policies},
        places={pool: document.num_pinned_on(pool) for pool in document.pools},
        priority=document.spec.priority,
        waits_since=progress.reason_at if progress is not None and progress.admitted else None,
    )


def _status(opened: OpenedJob, progress: Progress | None) -> dict[str, Any]:
    """Return the status that the operator would write for a job."""
    if progress is None:
        return {"phase": "Queued", "reason": Reason.WAITING_FOR_ORCHESTRATOR, "tenant": opened.document.tenant}
    # The progress of a job that was stopped keeps the time up to which it ran.
    turned = progress.admitted_at if progress.admitted else (progress.started_at and progress.at)
    admitted = {"type": "Admitted", "status": str(progress.admitted), "reason": progress.reason}
    return {
        "phase": progress.phase,
        "reason": progress.reason,
        "message": progress.message,
        "tenant": opened.document.tenant,
        "step": progress.step,
        "steps": progress.steps,
        "agents": [_agent(opened, agent.name, progress) for agent in opened.document.spec.agents],
        "reward": finite(progress.reward),
        "evalBefore": finite(progress.eval_before),
        "evalLast": finite(progress.eval_last),
        "usage": usage_status(progress.amounts),
        "startedAt": _iso(progress.started_at),
        "finishedAt": _iso(progress.finished_at),
        "conditions": [{**admitted, "lastTransitionTime": _iso(turned or opened.document.created_at)}],
    }


def _agent(opened: OpenedJob, name: str, progress: Progress) -> dict[str, Any]:
    agent = progress.agents.get(name, AgentProgress())
    adapter = opened.adapter_of(name)
    return {
        "name": name,
        "policyVersion": progress.versions.get(name),
        "adapter": str(adapter) if adapter.is_dir() else None,
        "reward": finite(agent.reward),
        "evalBefore": finite(agent.eval_before),
        "evalLast": finite(agent.eval_last),
        "untrainedSteps": dict(agent.untrained) or None,
        "usage": usage_status(progress.usage[name]) if name in progress.usage else None,
    }


def _iso(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()
