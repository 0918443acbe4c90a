"""Result of a job, from its last progress and its records, and `summary.json`. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marlaas.local.table import finite
from marlaas_api.messages import EvalRecord, EvalSample, JobDocument, Phase, Progress, StepRecord


@dataclass(frozen=True, slots=True)
class Failure:
    """The runner's reason for giving up a job: a CamelCase reason, and a sentence for users."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class JobResult:
    """State of a job at the end of a run; the job itself may be unfinished. `steps` and `evals` are in order.

    last_fault: text of the last recorded fault; empty if none is recorded. load_notes: what loading its environment left
    behind, in sentences.
    """

    document: JobDocument
    progress: Progress | None = None
    steps: tuple[StepRecord, ...] = ()
    evals: tuple[EvalRecord, ...] = ()
    failure: Failure | None = None
    last_fault: str = ""
    load_notes: tuple[str, ...] = ()

    @property
    def phase(self) -> Phase:
        """The job's own phase; Failed if the runner gave it up."""
        if self.failure is not None:
            return Phase.FAILED
        return self.progress.phase if self.progress is not None else Phase.QUEUED

    @property
    def versions(self) -> dict[str, int]:
        """By agent, the promoted version, or else the newest version; without agents that have no version 0 yet."""
        return {} if self.progress is None else self.progress.published

    @property
    def version(self) -> int | None:
        """The sum of the agents' versions, as in the records; None before an agent has version 0."""
        return sum(self.versions.values()) if self.versions else None

    @property
    def first_eval(self) -> EvalRecord | None:
        """The evaluation of version 0; None if there is none."""
        return self.evals[0] if self.evals and self.evals[0].version == 0 else None

    @property
    def last_eval(self) -> EvalRecord | None:
        """The evaluation of the reported version, or else the newest one after version 0."""
        later = [record for record in self.evals if record.version > 0]
        exact = [record for record in later if record.version == self.version]
        found = exact or later
        return found[-1] if found else None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One held-out prompt with the replies and rewards before and after training."""

    before: EvalSample
    after: EvalSample


def exchanges(result: JobResult, limit: int = 5) -> tuple[Exchange, ...]:
    """Return the first held-out tasks of the main suite that were sampled both before training and at the end."""
    if result.first_eval is None or result.last_eval is None:
        return ()
    main = result.document.spec.evaluation.main
    later = {sample.index: sample for sample in result.last_eval.samples if sample.suite == main}
    firsts = ((sample, later.get(sample.index)) for sample in result.first_eval.samples if sample.suite == main)
    pairs = [Exchange(before, after) for before, after in firsts if after is not None]
    return tuple(sorted(pairs, key=lambda pair: pair.before.index)[:limit])


def summary(results: Sequence[JobResult]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the content of `summary.json`."""
    return {"jobs": {str(result.document.ref): _job_summary(result) for result in results}}


def _job_summary(result: JobResult) -> dict[str, Any]:
    progress, before, after = result.progress, result.first_eval, result.last_eval
    return {
        "phase": result.phase.value,
        "evalBefore": finite(before.reward_mean if before else (progress.eval_before if progress else None)),
        "evalAfter": finite(after.reward_mean if after else None),
        "steps": progress.step if progress else 0,
        "policyVersion": result.version,
        **_agents_summary(result),
        **({"suites": suites} if (suites := _suites_summary(result)) else {}),
        "wallSeconds": _wall_s(progress),
        "faults": dict(progress.faults) if progress else {},
        "trainingFaults": dict(progress.training_faults) if progress else {},
        **({"lastFault": result.last_fault} if result.last_fault else {}),
        **({"loadNotes": list(result.load_notes)} if result.load_notes else {}),
        **reason(result),
    }


def suite_scores(result: JobResult) -> dict[str, tuple[float | None, float | None]]:
    """Return the figures of the suites before and after training, by name: `aime`, `aime pass@4`, `aime majority`."""
    first, last = result.first_eval, result.last_eval
    before, after = (one.suite_figures() if one is not None else {} for one in (first, last))
    return {name: (before.get(name), after.get(name)) for name in before | after}


def _suites_summary(result: JobResult) -> dict[str, object]:
    return {
        name: {"before": finite(before), "after": finite(after)}
        for name, (before, after) in suite_scores(result).items()
    }


def _agents_summary(result: JobResult) -> dict[str, object]:
    """Return each agent's version and evaluations, if the job has several agents."""
    scores = agent_scores(result)
    if not scores:
        return {}
    return {
        "agents": {
            name: {"evalBefore": before, "evalAfter": after, "policyVersion": version}
            for name, (version, before, after) in scores.items()
        }
    }


def agent_scores(result: JobResult) -> dict[str, tuple[int | None, float | None, float | None]]:
    """Return, by agent, its version and its evaluations before and after training; empty if the job has one agent."""
    policies = {agent.name: agent.policy_name for agent in result.document.spec.agents}
    before, after = (one.rewards if one else {} for one in (result.first_eval, result.last_eval))
    if len(policies) == 1:
        return {}
    return {
        name: (result.versions.get(policy), finite(before.get(name)), finite(after.get(name)))
        for name, policy in policies.items()
    }


def _wall_s(progress: Progress | None) -> float:
    if progress is None or progress.started_at is None:
        return 0.0
    return round((progress.finished_at or progress.at or progress.started_at) - progress.started_at, 3)


def reason(result: JobResult) -> Mapping[str, str]:
    """Return `reason` and `message` of a job that has not succeeded; empty if it has."""
    if result.failure is not None:
        return {"reason": result.failure.reason, "message": result.failure.message}
    if result.phase is Phase.SUCCEEDED or result.progress is None:
        return {}
    return {"reason": result.progress.reason, "message": result.progress.message}


def all_succeeded(results: Sequence[JobResult]) -> bool:
    """Return whether every job succeeded."""
    return all(result.phase is Phase.SUCCEEDED for result in results)
