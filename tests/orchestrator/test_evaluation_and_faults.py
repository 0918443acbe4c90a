"""When a job is evaluated, which version is promoted, and what fails a job: faults, and trainers that gave it up."""

import pytest
from tests.harness import a_step, an_episode, changed, identity
from tests.orchestrator.harness import a_job
from tests.tables import data, rows

from marlaas_api import messages
from marlaas_api.messages.job_spec import EvaluationSettings, SuiteSettings
from marlaas_api.names import Split
from marlaas_worker.orchestrator.diagnosis import RETURN_S, FaultWatch, GivenUp
from marlaas_worker.orchestrator.evaluation import EvaluationRun
from marlaas_worker.orchestrator.job_state import JobHistory, JobState
from marlaas_worker.orchestrator.reports import Seen, ending, progress
from marlaas_worker.orchestrator.step_records import Around, EvaluationEnd, eval_record, step_record
from marlaas_worker.orchestrator.usage import AdmittedTime, JobUsage

WORDS = "turn 3 carries version 9"
PAIR = [{"name": "a"}, {"name": "b"}]


def first_evaluation(job: messages.JobDocument) -> messages.EvalRecord:
    return messages.EvalRecord(**identity(job), step=0, version=0, at=1.0, reward_mean=0.5, num_episodes=2)


def policies(job: messages.JobDocument, **versions: int) -> dict[str, messages.PolicyRecord]:
    return {name: messages.PolicyRecord(uid=job.uid, version=one, step=one - 1) for name, one in versions.items()}


@pytest.mark.parametrize(("staleness", "expected"), [(0, [(0, 0), (2, 2), (3, 4)]), (1, [(0, 0), (3, 4)])])
def test_no_evaluation_is_skipped_if_steps_pass_before_it_is_asked_for(document, staleness, expected):
    """A strict job evaluates the versions after each due step, even if the evaluation begins late: its seed alone decides which is promoted.

    Steps may be recorded in quick succession (step 2 has no signal here), or while a quota pauses the job. After a restart,
    the same evaluations are due.
    """
    job = document(steps=4, maxStaleness=staleness, groupsPerStep=1)
    own = [messages.AgentStep(outcome="committed", version=version) for version in (1, 2, 2, 3)]
    steps = tuple(a_step(job, at, version=one.version, agents={"policy": one}) for at, one in enumerate(own))
    made: list[messages.EvalRecord] = []
    while True:
        known = JobHistory(steps=steps, evaluations=tuple(made), policies=policies(job, policy=3))
        if (run := JobState(job, known).due_evaluation()) is None:
            break
        made.append(eval_record(job, run, EvaluationEnd(1.0, (), {})))
    assert [(one.version, one.step) for one in made] == expected


def test_faults_beyond_the_stated_share_fail_the_job_in_words_without_control_characters(document, play):
    watch = FaultWatch(window=4, max_share=0.5, at_least=2)
    first, second = play(document(), 0, (None, None))
    watch.add(first)
    assert watch.verdict() is None
    watch.add(second.model_copy(update={"fault_text": "\x1b[2Jall is well"}))
    words = r"100% of the last 2 episodes were lost to faults; the last one: env: \x1b[2Jall is well"
    assert watch.verdict() == words, "it ends in the terminal of whoever lists jobs"
    for scored in play(document(), 1, (1.0, 1.0)):
        watch.add(scored)
    assert watch.verdict() is None


def test_an_environment_that_does_not_fit_the_job_fails_it_at_once_unless_it_has_worked(document, play):
    """An environment that has worked is not given up because one sandbox cannot load it."""
    job = document()
    misfit = {"fault": messages.FaultClass.ENV, "fault_text": "lacks \x1b[2Jcritic", "is_permanent": True}
    misfits = [an_episode(job, index, 0, **misfit) for index in (1, 2)]
    known = JobState(job, JobHistory(evaluations=(first_evaluation(job),))).faults
    fresh, running = FaultWatch(window=8, max_share=1.0, at_least=8), FaultWatch(window=2, max_share=0.5, at_least=2)
    running.add(play(job, 0, (1.0,))[0])
    for watch, permanent in ((fresh, r"lacks \x1b[2Jcritic"), (known, ""), (running, "")):
        for misfit in misfits:
            watch.add(misfit)
        assert watch.permanent == permanent
    assert "100% of the last 2 episodes were lost to faults" in str(running.verdict())


def trainer(name: str, broken: bool, pool: str = "tiny", agent: str = "policy") -> messages.ReplicaReport:
    key = f"uid-sums.{agent}"
    return messages.ReplicaReport(role="trainer", pool=pool, replica=name, broken={key: WORDS} if broken else {})


def test_a_team_is_given_up_when_every_trainer_of_one_of_its_pools_says_so_of_the_same_agent(document):
    team, given_up = document(agents=[{"name": "a"}, {"name": "b", "poolRef": {"name": "big"}}]), GivenUp()
    of_tiny = [trainer("t0", True, agent="a"), trainer("t1", False)]
    assert given_up.words(team, [*of_tiny, trainer("t0", False, "big")], 0.0) is None
    broken = trainer("t0", True, "big", "b")
    assert given_up.words(team, [*of_tiny, broken], 1.0) == WORDS, "trainers of two pools may have one name"
    pair, given_up = document(agents=PAIR), GivenUp()
    second = trainer("t1", True, agent="b")
    assert given_up.words(pair, [trainer("t0", True, agent="a"), second], 0.0) is None
    assert given_up.words(pair, [trainer("t0", True, agent="b"), second], 1.0) == WORDS


def test_a_trainer_that_is_being_replaced_may_still_take_the_job_and_one_that_stays_away_may_not(document):
    given_up, job = GivenUp(), document()
    given_up.words(job, [trainer("t0", False), trainer("t1", False)], 1000.0)
    assert given_up.words(job, [trainer("t0", True)], 1000.0 + RETURN_S - 1) is None
    assert given_up.words(job, [trainer("t0", True)], 1000.0 + RETURN_S) == WORDS


SUITES = (SuiteSettings(name="greedy", tasks=2, temperature=0.0), SuiteSettings(name="aime", tasks=3, samples=4))


def test_a_suite_of_several_samples_has_the_unbiased_pass_at_k_and_the_reward_of_the_majority(document):
    job = document()
    run = EvaluationRun(0, 0, EvaluationSettings(suites=SUITES, suite="aime"), {"policy": 0})
    assert run.missing() == [(0, 0), (1, 0), *((index, member) for index in (2, 3, 4) for member in range(4))]
    for index, member, reward, answer in data(__file__, "samples"):
        fault = {"fault": messages.FaultClass.ENV} if reward is None else {}
        name = {"split": Split.EVAL, "group": f"{job.uid}-e{index}v0", "answer": answer, **fault}
        run.add(an_episode(job, index, member, rewards={"policy": reward or 0.0}, **name))
    assert run.complete
    record = eval_record(job, run, EvaluationEnd(1.0, (), {}))
    greedy, aime = record.suites["greedy"], record.suites["aime"]
    assert (greedy.reward_mean, greedy.pass_at, greedy.majority) == (0.5, {}, None)
    assert record.reward_mean == aime.reward_mean == pytest.approx((1 + 1 + 1) / 11)  # by episode, without the fault
    squares = (0.5 - 5 / 18) ** 2 + (1 / 3 - 5 / 18) ** 2 + (5 / 18) ** 2
    assert aime.standard_error == pytest.approx((squares / 6) ** 0.5)
    # C(4, 2) = 6 pairs: 2 of 4 solved leave 1 without a solved one, 0 of 4 all; the task of 3 samples with 1 solved leaves 1 of 3
    assert aime.pass_at == pytest.approx({"1": (1 / 2 + 1 / 3 + 0) / 3, "2": (5 / 6 + 2 / 3 + 0) / 3, "4": (1 + 0) / 2})
    assert aime.majority == pytest.approx((1 + 0 + 0) / 3)


def test_a_job_of_no_steps_ends_once_version_zero_is_evaluated(document):
    job = document(steps=0)
    state = JobState(job, JobHistory(policies=policies(job, policy=-1)))
    assert (ending(state, Seen(), None, 0.0), state.due_evaluation()) == (None, None)
    state = JobState(job, JobHistory(policies=policies(job, policy=0)))
    assert ending(state, Seen(), None, 0.0) is None
    state.apply(eval_record(job, state.due_evaluation(), EvaluationEnd(1.0, (), {})))
    assert ending(state, Seen(), None, 0.0)[0] is messages.Phase.SUCCEEDED


def test_an_agents_mean_is_over_the_tasks_that_may_call_it_and_each_episode_counts_once_for_the_team():
    job, versions = a_job(agents=[{"name": "x"}, {"name": "o"}]), {"x": 0, "o": 0}
    own = [{"rewards": {"x": reward, "o": 9.0}, "may_speak": ("x",)} for reward in (1.0, 0.0)]
    of_x = [an_episode(job, 0, member, leaves={"x": (0,)}, **fields) for member, fields in enumerate(own)]
    both = {"rewards": {"x": 0.5, "o": 1.0}, "leaves": {"x": (0,), "o": (1,)}}
    of_both = [an_episode(job, 1, member, **both) for member in range(2)]
    ledger = messages.IssueLedger(**identity(job), next_index=2, open=(0, 1))
    state = JobState(job, JobHistory(log=(ledger,), policies=policies(job, **versions)))
    for episode in (*of_x, *of_both):
        state.add_episode(episode)
    for index in range(2):
        state.apply(state.assembly.decision(state.groups.complete[index], versions))
    record = step_record(job, state.assembly.drafts[0], {}, Around(0.0, 1.0))
    assert {name: part.reward_mean for name, part in record.agents.items()} == {"x": 0.5, "o": 1.0}
    assert record.reward_mean == (1.0 + 0.0 + 0.75 + 0.75) / 4, "the mean of the agents' means is 0.75"
    assert record.num_episodes == 4
    run = EvaluationRun(0, 0, EvaluationSettings(tasks=2), versions)
    for episode in (of_x[0], of_both[0]):
        run.add(episode.model_copy(update={"split": Split.EVAL}))
    evaluated = eval_record(job, run, EvaluationEnd(1.0, (), {}))
    assert (evaluated.reward_mean, evaluated.rewards) == ((1.0 + 0.75) / 2, {"x": 0.75, "o": 1.0})


@pytest.mark.parametrize(("promote", "rewards", "promoted"), rows(__file__, "promotions"))
def test_the_agents_of_a_team_are_promoted_together_by_the_best_mean_of_the_team(promote, rewards, promoted):
    """In the evaluation at version 5, the agent `o` alone was best."""
    job = a_job(agents=[{"name": "x"}, {"name": "o"}])
    job = changed(job, evaluation=job.spec.evaluation.model_copy(update={"promote": promote}))
    evaluated_at = {0: {"x": 0, "o": 0}, 3: {"x": 2, "o": 1}, 5: {"x": 3, "o": 2}}
    evaluations = []
    for version, mean in rewards.items():
        own = {"x": 0.0, "o": 1.0} if version == 5 else {"x": mean, "o": mean}
        found = {"step": version, "version": version, "reward_mean": mean, "rewards": own}
        evaluations.append(first_evaluation(job).model_copy(update=found | {"versions": evaluated_at[version]}))
    policies = {name: messages.PolicyRecord(uid=job.uid, version=version) for name, version in evaluated_at[5].items()}
    state = JobState(job, JobHistory(evaluations=tuple(evaluations), policies=policies))
    ended = (messages.Phase.SUCCEEDED, "Finished", "")
    found = progress(state, JobUsage(job.uid), AdmittedTime(0.0, 0.0, 0.0), ended, 1.0)
    assert found.promoted == promoted
    assert found.adapters == {name: f"team-a/sums/uid-sums/{name}/v{promoted[name]}" for name in promoted}
