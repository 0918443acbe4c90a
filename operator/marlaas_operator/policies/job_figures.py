"""The fields of a job's status that come from its progress, of the job and of each agent."""

from collections.abc import Sequence
from typing import Any

from marlaas_api.kinds import RLJob
from marlaas_api.messages import AgentProgress, Progress, SuiteProgress
from marlaas_api.usage_objects import usage_status
from marlaas_operator.policies.conditions import figure, rfc3339, without_none

_WIDEST = 24
"""Characters of the column VERSION."""


def job_figures(job: RLJob | None, progress: Progress) -> dict[str, Any]:
    """Return the part of a job's status that comes from its progress."""
    agents = _agents(job, progress)
    return {
        "progress": f"{progress.step}/{progress.steps}",
        "step": progress.step,
        "steps": progress.steps,
        "agents": [_agent(name, policy, progress) for name, policy in agents],
        "versions": _versions([progress.versions.get(name) for name, policy in agents if name == policy]),
        "reward": figure(progress.reward, 3),
        "evalBefore": figure(progress.eval_before, 3),
        "evalLast": figure(progress.eval_last, 3),
        "suites": [_suite(name, one) for name, one in progress.suites.items()] or None,
        "staleness": figure(progress.staleness, 3),
        "tokens": progress.tokens,
        "tokensPerSecond": figure(progress.tokens_per_s, 1),
        "acceleratorSeconds": figure(progress.accelerator_s, 1),
        "usage": usage_status(progress.amounts) or None,
        "faults": dict(progress.faults) or None,
        "trainingFaults": dict(progress.training_faults) or None,
        "startedAt": rfc3339(progress.started_at) if progress.started_at is not None else None,
    }


def _suite(name: str, suite: SuiteProgress) -> dict[str, Any]:
    last = suite.last
    return without_none(
        {
            "name": name,
            "before": figure(suite.before, 3),
            "last": figure(last.reward_mean, 3),
            "standardError": figure(last.standard_error, 3),
            "passAt": {k: figure(value, 3) for k, value in last.pass_at.items()} or None,
            "majority": figure(last.majority, 3),
        }
    )


def _agents(job: RLJob | None, progress: Progress) -> list[tuple[str, str]]:
    """Return the job's agents by name, each with the agent whose policy it plays."""
    if job is None:
        return [(name, name) for name in sorted(progress.versions)]
    return [(agent.name, agent.policy_name) for agent in job.spec.agents]


def _versions(newest: Sequence[int | None]) -> str | None:
    """Return the versions of the job's policies as `12/11`, or the lowest and highest as `9-12` if that is too long."""
    known = [version for version in newest if version is not None]
    text = "/".join("?" if version is None else str(version) for version in newest)
    if not known:
        return None
    return text if len(text) <= _WIDEST else f"{min(known)}-{max(known)}"


def _agent(name: str, policy: str, progress: Progress) -> dict[str, Any]:
    own = progress.agents.get(name, AgentProgress())
    return without_none(
        {
            "name": name,
            "policyVersion": progress.versions.get(policy),
            "promotedVersion": progress.promoted.get(policy),
            "adapter": progress.adapters.get(name),
            "reward": figure(own.reward, 3),
            "evalBefore": figure(own.eval_before, 3),
            "evalLast": figure(own.eval_last, 3),
            "staleness": figure(own.staleness, 3) if name in progress.agents else None,
            "untrainedSteps": dict(own.untrained) or None,
            "usage": usage_status(progress.usage[name]) if name in progress.usage else None,
        }
    )
