"""Rewards of agents and of the team: means over the episodes whose tasks may call them, in records and in the progress; and promotion."""

import math

import pytest
from tests.harness import an_episode, changed, identity
from tests.orchestrator.harness import a_job

from marlaas_api.messages import (
    AgentProgress,
    Episode,
    EvalRecord,
    FaultClass,
    IssueLedger,
    JobDocument,
    Phase,
    PolicyRecord,
    StepRecord,
)
from marlaas_api.names import Split
from marlaas_worker.orchestrator.evaluation import EvaluationRun
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.recorded_totals import History
from marlaas_worker.orchestrator.reports import progress
from marlaas_worker.orchestrator.step_records import Around, EvaluationEnd, eval_record, sample, step_record
from marlaas_worker.orchestrator.usage import AdmittedTime, JobUsage

RELAY = [{"name": "caller"}, {"name": "reader"}]
STALE = {"staleness_mean": 1.5}


def played(job: JobDocument, index: int, member: int, reward: float, *spoke: str, **fields: object) -> Episode:
    """An episode with one reward for all agents, in which some of them spoke."""
    names = [agent.name for agent in job.spec.agents]
    leaves = {name: (names.index(name),) for name in spoke}
    return an_episode(job, index, member, **{"rewards": dict.fromkeys(names, reward), "leaves": leaves, **fields})


def evaluated(job: JobDocument, *episodes: Episode) -> tuple[float, dict[str, float]]:
    run = EvaluationRun(0, 0, len(episodes), dict.fromkeys([agent.name for agent in job.spec.agents], 0))
    for episode in episodes:
        run.add(episode.model_copy(update={"split": Split.EVAL}))
    record = eval_record(job, run, EvaluationEnd(1.0, (), {}))
    return record.reward_mean, record.rewards


def recorded(job: JobDocument, *episodes: Episode) -> StepRecord:
    """The record of a step whose groups are these episodes'."""
    policies = {agent.name: PolicyRecord(uid=job.uid, version=0) for agent in job.spec.policies}
    indices = tuple(sorted({episode.index for episode in episodes}))
    ledger = IssueLedger(**identity(job), next_index=len(indices), open=indices)
    state = JobState(job, History(ledger=ledger, policies=policies))
    for episode in episodes:
        state.add_episode(episode)
    for index in indices:
        state.resolve(state.groups.complete[index], dict.fromkeys(policies, 0))
    return step_record(job, state.assembly.drafts[0], {}, Around(0.0, 1.0))


def test_an_agent_that_speaks_only_in_the_better_episodes_raises_neither_its_mean_nor_the_teams():
    """A caller of the relay that makes no call ends the episode: then the reader does not speak, and nobody has a reward."""
    job = a_job(agents=RELAY)
    spoke = [("caller",), ("caller",), ("caller", "reader"), ("caller", "reader")]
    rewards = [0.0, 0.0, 1.0, 0.0]
    episodes = [played(job, index, 0, rewards[index], *spoke[index]) for index in range(4)]
    assert evaluated(job, *episodes) == (0.25, {"caller": 0.25, "reader": 0.25})
    groups = [played(job, number // 2, number % 2, rewards[number], *spoke[number]) for number in range(4)]
    record = recorded(job, *groups)
    assert (record.reward_mean, record.num_episodes) == (0.25, 4)
    assert record.reward_std == pytest.approx(math.sqrt(3 / 16))
    assert [part.reward_mean for part in record.agents.values()] == [0.25, 0.25]


def test_an_agents_mean_is_over_the_tasks_that_may_call_it_and_each_episode_counts_once_for_the_team():
    job = a_job(agents=[{"name": "x"}, {"name": "o"}])
    of_x = [
        played(job, 0, member, 0.0, "x", rewards={"x": reward, "o": 9.0}, may_speak=("x",))
        for member, reward in enumerate((1.0, 0.0))
    ]
    of_both = [played(job, 1, member, 0.0, "x", "o", rewards={"x": 0.5, "o": 1.0}) for member in range(2)]
    record = recorded(job, *of_x, *of_both)
    assert {name: part.reward_mean for name, part in record.agents.items()} == {"x": 0.5, "o": 1.0}
    assert record.reward_mean == (1.0 + 0.0 + 0.75 + 0.75) / 4, "the mean of the agents' means is 0.75"
    assert record.num_episodes == 4
    assert evaluated(job, of_x[0], of_both[0]) == ((1.0 + 0.75) / 2, {"x": 0.75, "o": 1.0})


def test_a_frozen_agent_has_a_mean_and_no_part_of_the_teams():
    job = a_job(agents=[{"name": "x"}, {"name": "judge", "trainable": False}])
    episodes = [played(job, 0, member, 0.0, "x", rewards={"x": float(member), "judge": 8.0}) for member in range(2)]
    record = recorded(job, *episodes)
    assert (record.reward_mean, record.agents["judge"].reward_mean) == (0.5, 8.0)
    assert evaluated(job, episodes[0]) == (0.0, {"x": 0.0, "judge": 8.0})


def test_the_progress_has_each_agents_figures_of_the_last_step_and_of_the_first_and_last_evaluation():
    """The second role of a policy and the agent that no task of the step may call have figures of their own."""
    job = a_job(agents=[{"name": "x"}, {"name": "o"}, {"name": "second", "policy": {"of": "x"}}])
    rewards = {"x": 0.5, "second": 0.25}
    step = recorded(job, *(played(job, 0, n, 0.0, "x", rewards=rewards, may_speak=(*rewards,)) for n in range(2)))
    step = step.model_copy(update={"agents": {**step.agents, "x": step.agents["x"].model_copy(update=STALE)}})
    evaluations = [
        EvalRecord(**identity(job), step=at, version=2 * at, at=1.0, reward_mean=0.5, num_episodes=1, rewards=own)
        for at, own in ((0, {"x": 0.0, "o": 0.25, "second": 0.5}), (1, {"x": 0.75, "o": 0.5}))
    ]
    policies = {name: PolicyRecord(uid=job.uid, version=1, step=0) for name in "xo"}
    state = JobState(job, History(steps=(step,), evaluations=tuple(evaluations), policies=policies))
    found = progress(state, JobUsage(job.uid), AdmittedTime(0.0, 0.0, 0.0), None, 1.0)
    assert found.agents == {
        "x": AgentProgress(reward=0.5, eval_before=0.0, eval_last=0.75, staleness=1.5),
        "o": AgentProgress(reward=None, eval_before=0.25, eval_last=0.5, staleness=0.0),
        "second": AgentProgress(reward=0.25, eval_before=0.5, eval_last=None, staleness=0.0),
    }
    assert found.versions == {"x": 1, "o": 1}
    assert found.adapters == {name: f"team-a/sums/uid-sums/{name}/v1" for name in "xo"}


@pytest.mark.parametrize(
    ("promote", "rewards", "promoted"),
    [
        ("last", {0: 0.1, 3: 0.9, 5: 0.4}, {"x": 3, "o": 2}),
        ("best", {0: 0.1, 3: 0.9, 5: 0.4}, {"x": 2, "o": 1}),
        ("best", {0: 0.9, 3: 0.2, 5: 0.4}, {"x": 0, "o": 0}),
        ("best", {0: 0.1, 3: 0.9, 5: 0.9}, {"x": 3, "o": 2}),
        ("best", {0: 0.1, 3: 0.9}, {"x": 2, "o": 1}),
    ],
)
def test_the_agents_of_a_team_are_promoted_together_by_the_best_mean_of_the_team(promote, rewards, promoted):
    """In the evaluation at version 5, the agent `o` alone was best."""
    job = a_job(agents=[{"name": "x"}, {"name": "o"}])
    job = changed(job, evaluation=job.spec.evaluation.model_copy(update={"promote": promote}))
    evaluated_at = {0: {"x": 0, "o": 0}, 3: {"x": 2, "o": 1}, 5: {"x": 3, "o": 2}}
    evaluations = [
        EvalRecord(
            **identity(job),
            **{"step": version, "version": version, "at": 1.0, "reward_mean": mean, "num_episodes": 2},
            versions=evaluated_at[version],
            rewards={"x": 0.0, "o": 1.0} if version == 5 else {"x": mean, "o": mean},
        )
        for version, mean in rewards.items()
    ]
    policies = {name: PolicyRecord(uid=job.uid, version=version) for name, version in evaluated_at[5].items()}
    state = JobState(job, History(evaluations=tuple(evaluations), policies=policies))
    ended = (Phase.SUCCEEDED, "Finished", "")
    found = progress(state, JobUsage(job.uid), AdmittedTime(0.0, 0.0, 0.0), ended, 1.0)
    assert found.promoted == promoted
    assert found.adapters == {name: f"team-a/sums/uid-sums/{name}/v{promoted[name]}" for name in promoted}


def test_held_out_tasks_that_may_call_no_trained_agent_and_faults_are_left_out():
    job = a_job(agents=[{"name": "x"}, {"name": "judge", "trainable": False}])
    fault = an_episode(job, 1, fault=FaultClass.ENV)
    apart = played(job, 2, 0, 1.0, "judge", may_speak=("judge",))
    assert evaluated(job, played(job, 0, 0, 0.25, "x"), fault, apart) == (0.25, {"x": 0.25, "judge": 0.625})
    team, rewards = evaluated(job, fault, apart)
    assert math.isnan(team)
    assert rewards == {"judge": 1.0}
    assert math.isnan(sample(fault, {}, ("x",)).reward)
    assert math.isnan(sample(apart, {}, ("x",)).reward)
    assert sample(played(job, 0, 0, 0.25, "judge"), {}, ("x",)).reward == 0.25
