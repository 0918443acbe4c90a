"""Builds the records of steps and evaluations, and the progress of a job. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marlaas_api.messages import (
    Episode,
    EvalRecord,
    EvalSample,
    GroupOutcome,
    JobDocument,
    Manifest,
    Phase,
    Progress,
    StepOutcome,
    StepRecord,
    TaskOutcome,
    Turn,
    UsageAmounts,
)
from marlaas_api.messages import JobVerdict as Finding
from marlaas_api.messages.usage import merged
from marlaas_api.names import AdapterRef
from marlaas_api.reasons import Reason
from marlaas_worker.orchestrator.admission import Admission
from marlaas_worker.orchestrator.evaluation import EvaluationRun, best
from marlaas_worker.orchestrator.experience import count_faults
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.steps import StepDraft
from marlaas_worker.orchestrator.usage import AdmittedTime, JobUsage


@dataclass(frozen=True, slots=True)
class Around:
    """Facts about a step that its groups do not contain.

    Attributes:
        began_at: unix seconds.
        ended_at: unix seconds.
        skips: visits skipped since the step before, as (solved, hopeless).
        outcomes: difficulties of its tasks.
        train_s: seconds of the trainer's computing, for manifests without them; None if not known.
    """

    began_at: float
    ended_at: float
    skips: tuple[int, int] = (0, 0)
    outcomes: tuple[TaskOutcome, ...] = ()
    train_s: float | None = None


def around(state: JobState, draft: StepDraft, started_at: float, now: float) -> Around:
    """Return the facts about a step that is recorded now. started_at: of the job."""
    return Around(
        began_at=state.last_step.at if state.last_step else started_at,
        ended_at=now,
        skips=state.unrecorded_skips(),
        outcomes=state.outcomes(draft.resolved),
        train_s=state.policy.train_s if state.policy.step == draft.step else None,
    )


def step_record(document: JobDocument, draft: StepDraft, manifest: Manifest | None, around: Around) -> StepRecord:
    """Return the record of a finished step. manifest: None for a no-op step."""
    rewards = [reward for group in draft.resolved for reward in group.rewards]
    staleness, dropped = [ready.staleness for ready in draft.assigned], draft.dropped
    # The policy record has the seconds of the newest step only, which may be a later one.
    train_s = around.train_s if manifest is None or manifest.train_s is None else manifest.train_s
    timed = {} if train_s is None else {"train_s": train_s}
    trainer = {} if manifest is None else {manifest.agent: UsageAmounts(trainer_s=train_s or 0.0)}
    return StepRecord(
        namespace=document.namespace,
        job=document.job,
        uid=document.uid,
        step=draft.step,
        outcome=StepOutcome.NO_OP if manifest is None else StepOutcome.COMMITTED,
        version=draft.base_version if manifest is None else manifest.version,
        at=around.ended_at,
        wall_s=around.ended_at - around.began_at,
        reward_mean=statistics.fmean(rewards) if rewards else 0.0,
        reward_std=statistics.pstdev(rewards) if rewards else 0.0,
        indices=tuple(sorted(group.index for group in draft.resolved)),
        num_groups=len(draft.assigned),
        num_episodes=len(rewards),
        num_zero_variance=sum(group.outcome is GroupOutcome.FLAT for group in draft.resolved),
        num_dropped=len(dropped),
        dropped_tokens=sum(group.usage.stale_tokens for group in dropped),
        skipped_solved=around.skips[0],
        skipped_hopeless=around.skips[1],
        outcomes=around.outcomes,
        staleness_mean=statistics.fmean(staleness) if staleness else 0.0,
        staleness_max=max(staleness, default=0),
        faults=dict(draft.faults()),
        metrics={} if manifest is None else manifest.metrics | timed,
        usage=merged(draft.usage(), trainer),
    )


@dataclass(frozen=True, slots=True)
class EvaluationEnd:
    """Facts about a complete evaluation that its episodes do not contain. at: unix seconds. samples: for people."""

    at: float
    samples: tuple[EvalSample, ...]
    usage: UsageAmounts


def eval_record(document: JobDocument, agent: str, run: EvaluationRun, end: EvaluationEnd) -> EvalRecord:
    """Return the record of a complete evaluation."""
    return EvalRecord(
        namespace=document.namespace,
        job=document.job,
        uid=document.uid,
        step=run.step,
        version=run.version,
        at=end.at,
        reward_mean=run.reward_mean(agent),
        num_episodes=len(run.scored()),
        faults=dict(count_faults(run.episodes.values())),
        metrics=run.metrics(),
        samples=end.samples,
        usage={agent: end.usage},
    )


def sample(episode: Episode, agent: str, turns: Sequence[Turn]) -> EvalSample:
    """Return an episode for people: its first prompt, and all replies joined by arrows."""
    return EvalSample(
        index=episode.index,
        prompt=_prompt(turns[0]) if turns else "",
        reply=" → ".join(turn.text for turn in turns),
        reward=episode.rewards.get(agent, float("nan")),
    )


def _prompt(turn: Turn) -> str:
    if isinstance(turn.append, str):
        return turn.append
    return turn.append[-1].content if turn.append else ""


def progress(
    state: JobState, usage: JobUsage, times: AdmittedTime, ended: tuple[Phase, str, str] | None, now: float
) -> Progress:
    """Return the progress of a job whose records are read."""
    document, last = state.document, state.last_step
    phase, reason, message = ended or (Phase.RUNNING, *_doing(state))
    evaluations = {version: record.reward_mean for version, record in sorted(state.evaluations.items())}
    promoted = best(evaluations, state.policy.version, document.spec.evaluation.promote)
    published = promoted if phase is Phase.SUCCEEDED else state.policy.version
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
        versions={state.agent: state.policy.version} if state.policy.version >= 0 else {},
        promoted={state.agent: promoted} if phase is Phase.SUCCEEDED else {},
        adapters=_adapters(document, state.agent, published),
        reward=last.reward_mean if last else None,
        eval_before=evaluations.get(0),
        eval_last=list(evaluations.values())[-1] if evaluations else None,
        staleness=last.staleness_mean if last else 0.0,
        **usage.totals(),
        trainer_s=state.recorded.trainer_s,
        num_outstanding=len(state.in_flight) + state.assembly.num_uncommitted(),
        skipped_solved=state.walk.solved,
        skipped_hopeless=state.walk.hopeless,
        faults=dict(state.fault_totals()),
        training_faults=dict(state.recorded.training_faults),
        tenant=document.tenant,
        usage=state.recorded.usage,
        **times.as_of(now),
        finished_at=now if phase.final else None,
        at=now,
    )


def queued(document: JobDocument, before: Progress | None, admission: Admission) -> Progress:
    """Return the progress of a job that is not admitted now; its results so far stay."""
    update = {
        "phase": Phase.SUSPENDED if document.spec.suspend else Phase.QUEUED,
        "admitted": False,
        "reason": admission.reason,
        "message": admission.message,
    }
    return _progress(document, before, update)


def admitted(document: JobDocument, before: Progress | None, times: AdmittedTime) -> Progress:
    """Return the progress of an admitted job whose records are not read yet."""
    update = {
        "phase": Phase.RUNNING,
        "admitted": True,
        "reason": Reason.ADMITTED.value,
        "message": "admitted; reading its records",
        "started_at": times.started_at,
        "admitted_at": times.admitted_at,
    }
    return _progress(document, before, update)


def failed(document: JobDocument, before: Progress | None, why: Finding, now: float) -> Progress:
    """Return the progress of a job that was refused or whose task failed."""
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
    update = {**said, "generation": document.generation, "steps": steps, "tenant": document.tenant}
    if before is not None:
        return before.model_copy(update=update)
    return Progress.model_validate(
        {**update, "namespace": document.namespace, "job": document.job, "uid": document.uid}
    )


def _adapters(document: JobDocument, agent: str, version: int) -> dict[str, str]:
    if version < 0:
        return {}
    return {agent: AdapterRef(document.namespace, document.job, document.uid, agent, version).blob_prefix}


def ending(state: JobState, given_up: str | None, admitted_s: float) -> tuple[Phase, str, str] | None:
    """Return why a job ends now, as phase, reason and message; None if it goes on.

    Args:
        given_up: the reason of its trainers, if all have given it up.
        admitted_s: seconds for which it was admitted, in total.
    """
    spec, faults = state.document.spec, state.faults.verdict()
    deadline = spec.active_deadline_seconds
    if given_up is not None:
        return Phase.FAILED, "TrainingFailed", given_up
    if faults is not None:
        return Phase.FAILED, "TooManyFaults", faults
    if deadline is not None and admitted_s > deadline:
        text = f"still running after {deadline:g} s of being admitted (activeDeadlineSeconds)"
        return Phase.FAILED, "DeadlineExceeded", text
    if state.training_over and state.evaluation is None and state.due_evaluation() is None:
        return Phase.SUCCEEDED, "Finished", f"{state.finished} steps, version {state.policy.version}"
    return None


def _doing(state: JobState) -> tuple[str, str]:
    if state.policy.version < 0:
        return "WaitingForTrainer", "waiting for a trainer to publish version 0"
    if state.pauses:
        return Reason.OVER_QUOTA.value, state.pauses
    if state.waits:
        return Reason.WAITING_FOR_BUS_SPACE.value, state.waits
    if state.evaluation is not None and state.training_over:
        done, total = len(state.evaluation.episodes), state.evaluation.num_tasks
        return "Evaluating", f"last evaluation: {done} of {total} held-out tasks have ended"
    if state.in_flight:
        return "Training", f"{len(state.in_flight)} groups are being played"
    return "Training", f"{state.assembly.num_uncommitted()} groups wait for the trainer"
