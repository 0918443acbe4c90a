"""`marlaas why`: one paragraph about a job: its state or what it waits for, since when, and what to do. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from marlaas.cluster.pool_readiness import cause_of, readiness
from marlaas.cluster.views import (
    WARNING,
    ClusterEventView,
    ClusterJobView,
    ClusterPoolView,
    condition,
    seconds,
)
from marlaas.cluster.waits import JobsBeside, expected_room
from marlaas.local.idle import AgentActivity, idle
from marlaas.local.table import duration, number, sentence, versions
from marlaas_api.kinds.status import AgentStatus, Condition, RLJobStatus
from marlaas_api.last_words import visible
from marlaas_api.reason_texts import NOTHING, Actor, ReasonStage, Text, text_of
from marlaas_api.reasons import Reason

SILENCE_S = 60.0
"""Seconds after which a missing status of a new job is reported as a late operator."""
RECENT_S = 600.0
"""Older warnings are left out: their cause is over, or is the reported reason."""

_SILENT = "check whether the operator runs: `kubectl get pods -A -l app.kubernetes.io/component=operator`."
_NEWER = "This command does not know the reason; a newer MARLaaS set it."
_UNKNOWN = {
    "RoleFailed": "A process that the job needs failed and is not restarted.",
    "ResultUnreadable": "The run cannot read the job's results.",
}
"""Reasons of runs on this machine that no object in a cluster has."""


@dataclass(frozen=True, slots=True)
class ClusterContext:
    """Objects of the cluster that explain a job's state.

    pools: the job's pools; without those that do not exist or that the user may not read.
    jobs: other jobs of the pools and of the tenant.
    advice, free: of a run on this machine, the advice for a reason, instead of that of the reasons' table; and by pool, the
        number of agents that it admits beside those of running jobs, instead of the pools' status.
    """

    pools: Sequence[ClusterPoolView] = ()
    events: Sequence[ClusterEventView] = ()
    jobs: Sequence[ClusterJobView] = ()
    advice: Callable[[str], str] | None = None
    free: Mapping[str, int] | None = None

    @property
    def free_places(self) -> Mapping[str, int] | None:
        """By pool, the number of agents that it admits beside those of running jobs; None if it is not known of all pools."""
        if self.free is not None:
            return self.free
        known = {pool.name: pool.status.free_slots for pool in self.pools if pool.status is not None}
        found = {name: number for name, number in known.items() if number is not None}
        return found if len(found) == len(self.pools) else None

    @property
    def beside(self) -> JobsBeside:
        """The other jobs by phase."""
        phases = {one.key: one.status.phase for one in self.jobs if one.status is not None}
        of = {name: [one for one in self.jobs if phases.get(one.key) == name] for name in ("Running", "Queued")}
        return JobsBeside(of["Running"], of["Queued"])


def explain(job: ClusterJobView, around: ClusterContext, now: float) -> str:
    """Return one paragraph, followed by the job's multi-line message, indented.

    Control characters are removed: statuses and events contain text of tenants' code, and tenants can write events
    in their own namespaces.

    Args:
        now: unix seconds.
    """
    events, causes = around.events, {pool.name: cause_of(job, pool) for pool in around.pools}
    cause = next((one for one in causes.values() if one is not None), None)
    sentences = [_where(job, events, now), *_idle(job), *_why(job, now)]
    sentences += [said for pool in around.pools for said in readiness(job, pool, causes[pool.name], now)]
    sentences += [*expected_room(job, around.beside, around.free_places, now), *_unseen(job, now)]
    sentences += [*_warning(events, " ".join(sentences), now), *_advice(job, around, cause)]
    return visible("\n".join([" ".join(sentences), *_last_words(job)]))


def _where(job: ClusterJobView, events: Sequence[ClusterEventView], now: float) -> str:
    """Return the job's phase and how long it has lasted."""
    status = job.status
    if job.deleted_at is not None:
        return f"{job.key} was marked for deletion {_ago(job.deleted_at, now)} ago."
    if status is None or status.phase is None:
        return f"{job.key} was created {_ago(job.created_at, now)} ago and has no status yet."
    since = _ago(_since(job, status, events), now)
    match status.phase:
        case "Queued":
            return f"{job.key} has been queued for {since}{_at(status)}."
        case "Suspended":
            return f"{job.key} has been suspended for {since}{_at(status)}."
        case "Running":
            return f"{job.key} has been running for {since}{_at(status)}{_figures(job, status)}."
        case "Succeeded":
            return f"{job.key} succeeded {since} ago{_at(status)}{_figures(job, status)}."
    return f"{job.key} failed {since} ago{_at(status)}."


def _since(job: ClusterJobView, status: RLJobStatus, events: Sequence[ClusterEventView]) -> float:
    """Return the time when the phase began, in unix seconds.

    Queued and suspended jobs are both not admitted, so the condition does not tell them apart: the latest
    suspension event does.
    """
    if status.phase in ("Queued", "Suspended"):
        admitted = condition(status, "Admitted")
        turned = seconds(admitted.last_transition_time) if admitted is not None else None
        return max([turned or job.created_at, *(event.at for event in events if event.reason == Reason.SUSPENDED)])
    return seconds(status.started_at if status.phase == "Running" else status.finished_at) or job.created_at


def _at(status: RLJobStatus) -> str:
    return f", at step {status.step} of {status.steps}" if status.step and status.steps else ""


def _figures(job: ClusterJobView, status: RLJobStatus) -> str:
    own = (agent for agent in status.agents if agent.name in job.policies)
    newest = {agent.name: agent.policy_version for agent in own if agent.policy_version is not None}
    parts = [f"version {versions(newest)}"] if newest else []
    parts += _rewards(status)
    each = (f"{agent.name} {', '.join(found)}" for agent in status.agents if (found := _rewards(agent)))
    by_agent = f" ({'; '.join(each)})" if len(status.agents) > 1 else ""
    return f", {', '.join(parts)}{by_agent}" if parts else ""


def _rewards(of: RLJobStatus | AgentStatus) -> list[str]:
    """Return the last reward and the evaluations of a job or an agent, as far as they are known."""
    parts = [f"reward {number(of.reward)}"] if of.reward is not None else []
    if of.eval_before is not None and of.eval_last is not None:
        parts.append(f"evaluation {number(of.eval_before)} → {number(of.eval_last)}")
    return parts


def _idle(job: ClusterJobView) -> Iterator[str]:
    """Yield a sentence about each agent of which many steps trained no token, or that is never called."""
    status = job.status
    if status is not None and status.phase in ("Running", "Succeeded") and job.deleted_at is None:
        own = [agent for agent in status.agents if agent.name in job.policies]
        yield from idle(status.step or 0, [_activity(agent, job.policies[agent.name]) for agent in own])


def _activity(agent: AgentStatus, is_trained: bool) -> AgentActivity:
    used = agent.usage
    tokens = None if used is None else (used.prompt_tokens or 0) + (used.generated_tokens or 0)
    return AgentActivity(agent.name, agent.policy_version, is_trained, tokens, agent.untrained_steps or {})


def _why(job: ClusterJobView, now: float) -> Iterator[str]:
    """Yield the reason, with its meaning from the reasons' table and the status's own message."""
    if job.status is None or not job.status.reason:
        return
    reason, message = job.status.reason, (job.status.message or "").strip()
    text = text_of(reason)
    meaning = text.meaning if text is not None else _UNKNOWN.get(reason, _NEWER)
    since = _reason_since(job, job.status, text)
    lasting = f" (for {_ago(since, now)})" if since is not None else ""
    yield f"{reason}{lasting}: {meaning}"
    if message:
        yield "Its message is shown below." if "\n" in message else f"Message: {sentence(message)}"
    if job.status.sandbox_crashes and job.status.phase == "Running":
        yield f"Its sandbox has crashed {job.status.sandbox_crashes} times; spec.backoffLimit allows {job.backoff_limit}."


def _reason_since(job: ClusterJobView, status: RLJobStatus, text: Text | None) -> float | None:
    """Return since when a job waits for its pool or has a fault; None if it is not known.

    A fault began at the last transition of the condition that has its reason.
    """
    if status.reason in (Reason.WAITING_FOR_POOL, Reason.WAITING_FOR_TRAINER):
        return job.waits_since
    if text is None or text.stage is not ReasonStage.FAULTY:
        return None
    return next((seconds(one.last_transition_time) for one in status.conditions if one.reason == status.reason), None)


def _unseen(job: ClusterJobView, now: float) -> Iterator[str]:
    """Yield a sentence if the operator has not yet acted on the job's current generation."""
    status = job.status
    if status is None:
        is_late = now - job.created_at > SILENCE_S
        yield f"The operator is late. What to do (platform team): {_SILENT}" if is_late else "What to do: wait."
        return
    seen = status.observed_generation
    if seen is not None and seen < job.generation:
        yield f"The operator has not processed the last change (generation {job.generation}) yet; the status is of generation {seen}."


def _warning(events: Sequence[ClusterEventView], text: str, now: float) -> Iterator[str]:
    """Yield the latest recent warning whose message is not already in `text`."""
    warnings = [event for event in events if event.kind == WARNING and now - event.at <= RECENT_S]
    news = [one for one in warnings if one.message.rstrip(".") not in text and not _is_over(one, events)]
    if news:
        last = max(news, key=lambda event: event.at)
        yield f"Last warning, {_ago(last.at, now)} ago: {last.reason}: {sentence(last.message)}"


def _is_over(warning: ClusterEventView, events: Sequence[ClusterEventView]) -> bool:
    """Return whether the operator has since emitted a recovery event for this warning (`marlaas_operator.policies.conditions`)."""
    return any(
        event.reason == Reason.RECOVERED and event.at >= warning.at and event.message.startswith(warning.reason)
        for event in events
    )


def _advice(job: ClusterJobView, around: ClusterContext, cause: Condition | None) -> Iterator[str]:
    if job.status is None:
        return
    if around.advice is not None:
        advice = around.advice(job.status.reason or "")
        yield f"What to do: {advice}" if advice else "There is nothing to do."
        yield from _published(job.status)
        return
    reason = Reason.DELETING if job.deleted_at is not None else cause.reason if cause is not None else job.status.reason
    text = text_of(reason or "")
    if text is None:
        return
    if text.advice == NOTHING:
        yield "There is nothing to do."
        return
    whom = " (platform team)" if _actor(job.status, text, cause) is Actor.PLATFORM else ""
    yield f"What to do{whom}: {text.advice.replace('NAME', f'{job.name} -n {job.namespace}')}"
    yield from _published(job.status)


def _actor(status: RLJobStatus, text: Text, cause: Condition | None) -> Actor:
    """Return who must act: the tenant for a fault of the sandbox, the platform team for a fault of the pool.

    This overrides the actor that the reasons' table names for the reason.
    """
    if text.actor is Actor.NOBODY or (cause is None and text.stage is not ReasonStage.FAULTY):
        return text.actor
    sandbox = condition(status, "SandboxReady")
    return Actor.TENANT if sandbox is not None and sandbox.reason == status.reason else Actor.PLATFORM


def _published(status: RLJobStatus) -> Iterator[str]:
    """Yield the location of each adapter of a succeeded job."""
    agents = status.agents if status.phase == "Succeeded" else ()
    yield from (f"Agent {agent.name}: {agent.adapter}." for agent in agents if agent.adapter)


def _last_words(job: ClusterJobView) -> Iterator[str]:
    """Yield the lines of a multi-line message, such as a traceback, indented."""
    message = (job.status.message or "").strip() if job.status is not None else ""
    if "\n" in message:
        yield from (f"  {line}" for line in message.splitlines())


def _ago(then: float, now: float) -> str:
    return duration(max(0.0, now - then))
