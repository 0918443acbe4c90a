"""What a job says at its end."""

import pytest
from tests.harness import identity
from tests.orchestrator.harness import OrchestratorHarness, run_to_end

from marlaas_api.messages import Phase, PolicyRecord, ReplicaReport, StepOutcome, StepRecord, UsageAmounts
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.recorded_totals import History
from marlaas_worker.orchestrator.reports import ending


def ended(document, names: str, versions: dict[str, int], usage: dict[str, UsageAmounts]) -> str:
    job = document(agents=[{"name": name} for name in names], steps=1)
    job = job.model_copy(
        update={"spec": job.spec.model_copy(update={"evaluation": job.spec.evaluation.model_copy(update={"tasks": 0})})}
    )
    facts = {"outcome": StepOutcome.COMMITTED, "version": 1, "at": 1.0, "wall_s": 1.0, "indices": (0,)}
    rewards = {"reward_mean": 0.5, "reward_std": 0.0, "num_groups": 1, "num_episodes": 2}
    step = StepRecord(**identity(job), step=0, usage=usage, **facts, **rewards)
    policies = {name: PolicyRecord(uid=job.uid, version=version, step=0) for name, version in versions.items()}
    found = ending(JobState(job, History(steps=(step,), policies=policies)), None, 0.0)
    assert found is not None
    return found[2]


@pytest.mark.parametrize(
    ("usage", "why"),
    [
        ({}, "never called"),
        ({"generated_tokens": 5, "failed_tokens": 3, "repeated_tokens": 2}, "all its turns were lost to faults"),
        ({"generated_tokens": 5, "failed_tokens": 3, "zero_variance_tokens": 2}, "no group had signal for it"),
    ],
)
def test_an_agent_without_a_new_version_is_explained(document, usage, why):
    text = ended(document, "ab", {"a": 1, "b": 0}, {"b": UsageAmounts(**usage)} if usage else {})
    assert text == f"1 steps, versions a 1, b 0; not trained: b ({why})"


def a_report(uid: str, engine_s: float) -> ReplicaReport:
    role = {"role": "rollout", "pool": "tiny", "replica": "rollout-0"}
    return ReplicaReport(
        **role, job_tokens={uid: 40}, job_engine_s={uid: engine_s}, agent_slot_s={uid: {"policy": 99.0}}
    )


async def test_use_that_a_replica_reports_after_the_end_of_a_job_counts(harness: OrchestratorHarness, document):
    job = document()
    ended = await run_to_end(harness, job)
    await harness.put_report(**a_report(job.uid, 2.5).model_dump())
    async with harness.orchestrating():
        last = await harness.progress(job, lambda found: found.accelerator_s > 0)
    assert (last.phase, last.finished_at, last.accelerator_s) == (Phase.SUCCEEDED, ended.finished_at, 2.5)
    assert last.amounts.unrecorded_tokens == 40
