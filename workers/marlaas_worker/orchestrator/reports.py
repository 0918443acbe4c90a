"""Builds the progress of a job: its state as published in the bucket `progress`. Pure."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from marlaas_api.messages import (
    AgentProgress,
    EvalRecord,
    JobDocument,
    JobWait,
    Phase,
    Progress,
    SuiteProgress,
    UsageAmounts,
)
from marlaas_api.messages import JobVerdict as Finding
from marlaas_api.messages.usage import merged, total
from marlaas_api.names import AdapterRef
from marlaas_api.reasons import Reason
from marlaas_worker.orchestrator.admission import Admission
from marlaas_worker.orchestrator.diagnosis import warnings
from marlaas_worker.orchestrator.evaluation import best
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.usage import AdmittedTime, JobUsage


@dataclass(frozen=True, slots=True)
class Seen:
    """Reasons why a job waits that do not follow from its own state (`JobState`), as of the last iteration of its loop.

    Each is text for people, and empty if it does not apply.

    Attributes:
        over_quota: its tenant is over the quota of a rate.
        bus_space: the stream TURNS has no space for its groups.
        unserved: one of its pools has no ready rollout replica.
        trainerless: one of its pools with steps to train has no ready trainer.
    """

    over_quota: str = ""
    bus_space: str = ""
    unserved: str = ""
    trainerless: str = ""


def delayed(progress: Progress, waits: Iterable[tuple[str, JobWait]]) -> Progress:
    """Return a job's progress; if the job runs and has waits, with reason and message of its longest wait.

    waits: each as (role and name of the process on which the job waits, wait).
    """
    oldest = min(waits, key=lambda one: one[1].since, default=None)
    if oldest is None or progress.phase is not Phase.RUNNING:
        return progress
    worker, wait = oldest
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(wait.since))
    return progress.model_copy(
        update={"reason": wait.reason, "message": f"{worker}: {wait.message}; since {since} UTC"}
    )


def progress(
    state: JobState, usage: JobUsage, times: AdmittedTime, standing: tuple[Phase, str, str], now: float
) -> Progress:
    """Return the progress of a job whose records are read.

    Args:
        usage: tokens and seconds of the job, from the replicas' reports.
        times: times of its admissions.
        standing: phase, reason and message, as `ending` or `doing` returned.
        now: unix seconds.
    """
    document, last = state.document, state.last_step
    phase, reason, message = standing
    versions = {agent: version for agent, version in state.versions.items() if version >= 0}
    promoted = promoted_versions(state) if phase is Phase.SUCCEEDED else {}
    return Progress(
        namespace=document.namespace,
        job=document.job,
        uid=document.uid,
        generation=document.generation,
        phase=phase,
        admitted=not phase.final,
        reason=reason,
        message=message,
        step=state.finished,
        steps=document.spec.training.steps,
        versions=versions,
        promoted=promoted,
        adapters={
            agent: AdapterRef(document.namespace, document.job, document.uid, agent, version).blob_prefix
            for agent, version in (promoted or versions).items()
        },
        reward=last.reward_mean if last and not last.is_demonstrated else None,
        **_evaluations(state),
        suites=_suites(state.evaluations),
        staleness=last.staleness_mean if last else 0.0,
        **usage.totals(),
        trainer_s=state.recorded.trainer_s,
        num_outstanding=len(state.groups.in_flight) + state.assembly.num_uncommitted(),
        skipped_solved=state.tasks.walk.solved,
        skipped_hopeless=state.tasks.walk.hopeless,
        faults=dict(state.fault_totals()),
        training_faults=dict(state.recorded.training_faults),
        tenant=document.tenant,
        usage=_by_agent(state, usage),
        agents=_agents(state),
        warnings=warnings(state.document, state.last_step, _newest(state.evaluations)),
        **times.as_of(now),
        finished_at=now if phase.final else None,
        at=now,
    )


def _by_agent(state: JobState, usage: JobUsage) -> dict[str, UsageAmounts]:
    """Return the recorded usage of each agent, with the seconds of its slots and its stored bytes."""
    stored = {name: UsageAmounts(stored_bytes=record.stored_bytes) for name, record in state.policies.items()}
    return usage.with_slots(merged(state.recorded.usage, stored))


def _evaluations(state: JobState) -> dict[str, float | None]:
    """Return the fields of `Progress` for the mean rewards of version 0 and of the newest evaluated version; None if there is none."""
    means = {version: record.reward_mean for version, record in state.evaluations.items()}
    return {"eval_before": means.get(0), "eval_last": means[max(means)] if means else None}


def _suites(evaluations: Mapping[int, EvalRecord]) -> dict[str, SuiteProgress]:
    newest, first = _newest(evaluations), evaluations.get(0)
    before = {} if first is None else {name: one.reward_mean for name, one in first.suites.items()}
    found = {} if newest is None else newest.suites
    return {
        name: SuiteProgress(before=before.get(name), last=one.model_copy(update={"metrics": {}}))
        for name, one in found.items()
    }


def _newest(evaluations: Mapping[int, EvalRecord]) -> EvalRecord | None:
    return evaluations[max(evaluations)] if evaluations else None


def _agents(state: JobState) -> dict[str, AgentProgress]:
    """Return each agent's part of the progress."""
    parts = state.last_step.agents if state.last_step else {}
    known = state.evaluations
    first = known[0].rewards if 0 in known else {}
    last = known[max(known)].rewards if known else {}
    return {
        agent.name: AgentProgress(
            reward=part.reward_mean if (part := parts.get(agent.name)) else None,
            eval_before=first.get(agent.name),
            eval_last=last.get(agent.name),
            staleness=part.staleness_mean if part else 0.0,
            untrained=dict(state.recorded.untrained.get(agent.name, {})),
        )
        for agent in state.document.spec.agents
    }


def queued(document: JobDocument, before: Progress | None, admission: Admission) -> Progress:
    """Return the progress of a job that is not admitted now.

    Args:
        before: its stored progress, whose results stay; None if there is none.
        admission: why the job waits.
    """
    update = {
        "phase": Phase.SUSPENDED if document.spec.suspend else Phase.QUEUED,
        "admitted": False,
        "reason": admission.reason,
        "message": admission.message,
    }
    return _progress(document, before, update)


def preempted(document: JobDocument, before: Progress, cut: UsageAmounts, why: str) -> Progress:
    """Return the progress of a job that was preempted now.

    Args:
        before: its progress up to the preemption.
        cut: usage of the plays that the preemption cut.
        why: text for people.
    """
    recorded = total(before.usage.values())
    update = {
        "num_preemptions": before.num_preemptions + 1,
        "cut_tokens": max(before.cut_tokens, recorded.preempted_tokens) + cut.generated_tokens,
        "cut_engine_s": max(before.cut_engine_s, recorded.preempted_engine_s) + cut.engine_s,
    }
    counted = before.model_copy(update=update)
    return queued(document, counted, Admission(False, Reason.PREEMPTED, why))


def admitted(document: JobDocument, before: Progress | None, times: AdmittedTime) -> Progress:
    """Return the progress of an admitted job whose records are not read yet. before: its stored progress, with results so far; None: none."""
    update = {
        "phase": Phase.RUNNING,
        "admitted": True,
        "reason": Reason.ADMITTED.value,
        "message": "admitted; reading its records",
        "started_at": times.started_at,
        "admitted_at": times.admitted_at,
        "reason_at": times.admitted_at,
    }
    return _progress(document, before, update)


def failed(document: JobDocument, before: Progress | None, why: Finding, now: float) -> Progress:
    """Return the progress of a job that has failed.

    Args:
        before: its stored progress, whose results stay; None if there is none.
        why: a verdict of the operator, or an error of the job's control loop.
        now: unix seconds.
    """
    update = {
        "phase": Phase.FAILED,
        "admitted": False,
        "reason": why.reason,
        "message": why.message,
        "finished_at": now,
        "at": now,
    }
    return _progress(document, before, update)


def _progress(document: JobDocument, before: Progress | None, said: Mapping[str, object]) -> Progress:
    steps = document.spec.training.steps
    update = {"reason_at": None, **said, "generation": document.generation, "steps": steps, "tenant": document.tenant}
    if before is not None:
        return before.model_copy(update=update)
    return Progress.model_validate(
        {**update, "namespace": document.namespace, "job": document.job, "uid": document.uid}
    )


def dated(progress: Progress, before: Progress | None) -> Progress:
    """Return the progress of an admitted job with `reason_at` set: unix seconds since which the job has had its present reason.

    before: the progress as last published; None if there is none.
    """
    is_same = before is not None and before.admitted and before.reason == progress.reason
    since = before.reason_at if before is not None and is_same else progress.reason_at
    return progress.model_copy(update={"reason_at": progress.at if since is None else since})


def promoted_versions(state: JobState) -> dict[str, int]:
    """Return, by agent, the version that a finished job promotes: the last one, or that of the best evaluation (`evaluation.promote`)."""
    rewards = {version: record.reward_mean for version, record in state.evaluations.items()}
    chosen = best(rewards, state.version, state.document.spec.evaluation.promote)
    return state.versions if chosen == state.version else dict(state.evaluations[chosen].versions)


def ending(state: JobState, seen: Seen, given_up: str | None, admitted_s: float) -> tuple[Phase, str, str] | None:
    """Return why a job ends now, as phase, reason and message; None if it goes on.

    Args:
        seen: reasons why the job waits, for the message if the job is past its deadline.
        given_up: a trainer's reason, if all trainers of a pool have given the job up; None otherwise.
        admitted_s: seconds for which the job was admitted, in total.
    """
    faults = state.faults.verdict()
    if given_up is not None:
        return Phase.FAILED, "TrainingFailed", given_up
    if state.faults.permanent:
        return Phase.FAILED, Reason.INVALID_ENVIRONMENT.value, state.faults.permanent
    if faults is not None:
        return Phase.FAILED, "TooManyFaults", faults
    why = seen.over_quota or seen.bus_space or seen.unserved or _waits_for_trainers(state, seen)
    if (late := overdue(state.document, admitted_s, why)) is not None:
        return late
    if state.training_over and state.has_policies and state.evaluation is None and state.due_evaluation() is None:
        return (
            Phase.SUCCEEDED,
            "Finished",
            f"{state.finished} steps, {versions_text(state.versions)}{_untrained(state)}",
        )
    return None


def overdue(document: JobDocument, admitted_s: float, why: str) -> tuple[Phase, str, str] | None:
    """Return phase, reason and message of a job that has failed because it is past its deadline; None if it is not past it.

    Args:
        admitted_s: seconds for which the job was admitted, in total.
        why: what the job waited for; empty if for nothing.
    """
    deadline = document.spec.active_deadline_seconds
    if deadline is None or admitted_s <= deadline:
        return None
    text = f"still running after {deadline:g} s of being admitted (activeDeadlineSeconds)"
    return Phase.FAILED, Reason.DEADLINE_EXCEEDED.value, f"{text}; {why}" if why else text


def _untrained(state: JobState) -> str:
    """Return which trained agents are still at version 0, and why, as text.

    Empty if there are none, or if the job has one policy only.
    """
    usage, policies = state.recorded.usage, state.document.spec.policies
    untrained = [agent.name for agent in policies if agent.trainable and state.versions[agent.name] == 0]
    found = ", ".join(f"{name} ({_why_untrained(usage.get(name, UsageAmounts()))})" for name in untrained)
    return f"; not trained: {found}" if found and len(policies) > 1 else ""


def _why_untrained(usage: UsageAmounts) -> str:
    if usage.charged_tokens == 0:
        return "never called"
    is_lost = usage.charged_tokens == usage.failed_tokens + usage.repeated_tokens
    return "all its turns were lost to faults" if is_lost else "no group had signal for it"


def versions_text(versions: Mapping[str, int]) -> str:
    """Return the versions for people: `version 3`, or `versions solver 3, verifier 2`."""
    if len(versions) == 1:
        return f"version {next(iter(versions.values()))}"
    return "versions " + ", ".join(f"{agent} {version}" for agent, version in versions.items())


def training_pools(state: JobState) -> set[str]:
    """Return the pools whose trainers have steps of the job to train; none once every step is on record."""
    agents = () if state.training_over else (agent for agent in state.document.spec.policies if agent.trainable)
    return {state.document.pool_of(agent) for agent in agents}


def _waits_for_trainers(state: JobState, seen: Seen) -> str:
    """Return, as text, which trainers have not published version 0, or are not ready; empty if the job waits for none.

    If the job has several pools, the text names the pools and their agents.
    """
    if state.has_policies:
        return seen.trainerless
    document = state.document
    late = {document.pool_of(agent) for agent in document.spec.policies if state.versions[agent.name] < 0}
    where = f" of pool {' and of pool '.join(map(document.pool_text, sorted(late)))}" if len(document.pools) > 1 else ""
    return f"waiting for a trainer{where} to publish version 0"


def doing(state: JobState, seen: Seen) -> tuple[Phase, str, str]:
    """Return what a running job does or waits for, as phase, reason and message."""
    return (Phase.RUNNING, *_doing(state, seen))


def _doing(state: JobState, seen: Seen) -> tuple[str, str]:
    if not state.has_policies:
        return Reason.WAITING_FOR_TRAINER.value, _waits_for_trainers(state, seen)
    if seen.over_quota:
        return Reason.OVER_QUOTA.value, seen.over_quota
    if seen.bus_space:
        return Reason.WAITING_FOR_BUS_SPACE.value, seen.bus_space
    if seen.unserved:
        return Reason.WAITING_FOR_POOL.value, f"{seen.unserved}; the job goes on when one is"
    is_idle = state.evaluation is None and not state.groups.in_flight
    if seen.trainerless and is_idle:
        return Reason.WAITING_FOR_TRAINER.value, f"{seen.trainerless}; the job goes on when one is"
    if state.evaluation is not None and state.training_over:
        done, total = len(state.evaluation.episodes), state.evaluation.settings.num_episodes
        return "Evaluating", f"last evaluation: {done} of {total} held-out episodes have ended"
    if state.groups.in_flight:
        return "Training", f"{len(state.groups.in_flight)} groups are being played"
    return "Training", f"{state.assembly.num_uncommitted()} groups wait for the trainer"
