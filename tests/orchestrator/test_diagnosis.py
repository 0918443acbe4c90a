"""Figures of steps and evaluations, and the warnings of those that are out of their bounds."""

import pytest
from tests.harness import a_step, an_episode, identity
from tests.tables import rows

from marlaas_api.messages import EvalRecord, FaultClass, Lengths, PolicyRecord, StepPlays
from marlaas_api.messages.job_spec import EvaluationSettings
from marlaas_api.names import Split
from marlaas_worker.orchestrator.diagnosis import warnings
from marlaas_worker.orchestrator.evaluation import EvaluationRun, evaluated_text
from marlaas_worker.orchestrator.job_state import JobHistory, JobState
from marlaas_worker.orchestrator.step_records import Around, EvaluationEnd, eval_record, step_record


@pytest.mark.parametrize(("step", "reasons"), rows(__file__, "warnings"))
def test_a_figure_out_of_its_bounds_is_told(document, step, reasons):
    job = document()
    found = warnings(job, a_step(job, 3, **{"indices": range(10), **step}), None)
    assert [*found] == reasons
    assert [text for text in found.values() if "10% of all at turnTimeoutSeconds (128)" in text] == (
        list(found.values()) if reasons == ["RepliesCut"] else []
    )


def test_held_out_tasks_that_were_trained_on_are_told_and_the_distinct_ones_counted(document):
    job = document(steps=2, groupsPerStep=2)
    state = JobState(job, JobHistory(policies={"policy": PolicyRecord(uid=job.uid, version=0)}))
    state.assembly.begin(state.versions)
    state.apply(issued := state.issuing(2, 0))
    for index in issued.indices:
        for member in range(job.spec.rollout.group_size):
            fault = FaultClass.ENV if member > 1 else None
            rewards = {} if fault else {"policy": float(member)}
            counts = {"num_turns": 2, "num_cut": member, "num_overtime": member}
            counts |= {"num_tokens": 10 * (index + 1), "duration_s": 1.0 + index}
            one = an_episode(job, index, member, rewards=rewards, fault=fault, prompt=f"{index}", **counts)
            state.add_episode(one)
        state.apply(state.assembly.decision(state.groups.complete[index], {"policy": 0}))
    record = step_record(job, state.assembly.drafts[0], {}, Around(0.0, 1.0))
    lengths = Lengths(num_groups=2, mean=15.0, p10=10.0, p90=20.0, max=20, seconds=1.5)
    counts = {"num_prompts": 2, "num_turns": 8, "num_cut": 2, "num_overtime": 2}
    assert record.plays == StepPlays(trained=lengths, prompts=("0", "1"), **counts)
    state.apply(record)
    run = EvaluationRun(0, 1, EvaluationSettings(tasks=4), {"policy": 0})
    for index, prompt in enumerate(("1", "7", "7", "8")):
        name = {"split": Split.EVAL, "group": f"{job.uid}-e{index}v0"}
        run.add(an_episode(job, index, 0, rewards={"policy": 1.0}, prompt=prompt, **name))
    evaluated = eval_record(job, run, EvaluationEnd(1.0, (), {}, state.trained_prompts))
    assert (evaluated.num_prompts, evaluated.num_overlapping) == (3, 1)
    assert evaluated_text(evaluated) == "version 0: mean reward 1.000 over 4 episodes of 3 distinct tasks"
    assert "1 of 3 held-out tasks" in warnings(job, record, evaluated)["EvaluationOverlap"]
    again = JobState(job, JobHistory(steps=(record,), policies=state.policies))
    assert again.trained_prompts == {"0", "1"}
    unknown = EvalRecord(**identity(job), step=0, version=0, at=1.0, reward_mean=0.5, num_episodes=2)
    assert warnings(job, None, unknown) == {}
