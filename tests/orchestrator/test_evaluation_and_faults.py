"""When a job is evaluated, which version is promoted, and what fails a job: faults, trainers that gave it up, crashes in a row."""

import pytest
from tests.harness import an_episode, identity

from marlaas_api.messages import AgentStep, EvalRecord, EvalSample, FaultClass, PolicyRecord, ReplicaReport, StepRecord
from marlaas_api.messages.job_spec import EvaluationSettings
from marlaas_worker.orchestrator.evaluation import best, due
from marlaas_worker.orchestrator.faults import RETURN_S, FaultWatch, GivenUp
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.recorded_totals import History
from marlaas_worker.orchestrator.step_records import EvaluationEnd, eval_record

NAN = float("nan")
WORDS = "turn 3 carries version 9"


@pytest.mark.parametrize(("finished", "expected"), [(0, True), (1, False), (10, True), (25, True), (24, False)])
def test_evaluations_come_first_last_and_every_so_often(finished, expected):
    assert due(EvaluationSettings(every=10, tasks=64), finished, steps=25) is expected


def test_an_agent_that_is_a_step_ahead_is_no_reason_for_a_second_evaluation_after_the_same_step(document):
    job = document(agents=[{"name": "a"}, {"name": "b"}])
    evaluated = EvalRecord(**identity(job), step=0, version=0, at=1.0, reward_mean=0.5, num_episodes=2)
    for ahead, known in ((0, ()), (0, (evaluated,)), (1, (evaluated,))):
        policies = {"a": PolicyRecord(uid=job.uid, version=ahead), "b": PolicyRecord(uid=job.uid, version=0)}
        run = JobState(job, History(evaluations=known, policies=policies)).due_evaluation()
        assert (run is not None) is (known == ())


def test_in_strict_mode_an_evaluation_is_of_the_versions_after_the_recorded_steps(document):
    """An agent may have committed the next step when the orchestrator comes back, or when an evaluation was put off."""
    job = document(agents=[{"name": "a"}, {"name": "b"}])
    for ahead in (0, 1):
        policies = {
            "a": PolicyRecord(uid=job.uid, version=ahead, step=ahead - 1),
            "b": PolicyRecord(uid=job.uid, version=0),
        }
        run = JobState(job, History(policies=policies)).due_evaluation()
        assert run is not None
        assert (run.version, run.versions) == (0, {"a": 0, "b": 0})


def test_an_evaluation_that_a_restart_finds_after_further_steps_is_of_its_own_step_and_the_next_one_is_due(document):
    """Recorded under the step of the restart, it would count as that step's evaluation, which would then never be made."""
    job = document(steps=2, maxStaleness=1, groupsPerStep=1)
    names, policies = identity(job), {"policy": PolicyRecord(uid=job.uid, version=0)}
    begun = JobState(job, History(policies=policies))
    run = begun.due_evaluation()
    assert run is not None
    begun.begin_evaluation(run, 0)
    figures = {"outcome": "committed", "at": 1.0, "wall_s": 1.0, "reward_mean": 0.5, "reward_std": 0.5}
    figures |= {"num_groups": 1, "num_episodes": 2}
    steps = tuple(StepRecord(**names, **figures, step=step, version=step + 1, indices=(step,)) for step in range(2))
    policies = {"policy": PolicyRecord(uid=job.uid, version=2, step=1)}
    state = JobState(job, History(steps=steps, ledger=begun.ledger(), policies=policies))
    assert state.evaluation is not None
    assert (state.evaluation.version, state.evaluation.step) == (0, 0)
    sample = EvalSample(index=0, prompt="2 + 2 =", reply="4" * 1000, reward=1.0)
    ended = eval_record(job, state.evaluation, EvaluationEnd(1.0, (sample,), {}))
    state.record_evaluation(ended)
    for one in (state, JobState(job, History(evaluations=(ended,)))):
        assert (one.evaluations[0].step, one.evaluations[0].samples) == (0, ()), "samples are for people"
    last = state.due_evaluation()
    assert last is not None
    assert (last.version, last.step) == (2, 2)


@pytest.mark.parametrize(("staleness", "evaluated"), [(0, [(0, 0), (2, 2), (3, 4)]), (1, [(0, 0), (3, 4)])])
def test_no_evaluation_is_skipped_if_steps_pass_before_it_is_asked_for(document, staleness, evaluated):
    """A strict job evaluates the versions after each due step, even if the evaluation begins late: its seed alone decides which is promoted.

    Steps may be recorded in quick succession (step 2 has no signal here), or while a quota pauses the job. After a restart,
    the same evaluations are due.
    """
    job = document(steps=4, maxStaleness=staleness, groupsPerStep=1)
    figures = {"at": 1.0, "wall_s": 1.0, "reward_mean": 0.5, "reward_std": 0.5, "num_groups": 1, "num_episodes": 2}
    steps = [
        StepRecord(
            **identity(job),
            **figures,
            outcome="committed",
            step=step,
            version=version,
            indices=(step,),
            agents={"policy": AgentStep(outcome="committed", version=version)},
        )
        for step, version in enumerate((1, 2, 2, 3))
    ]
    policies = {"policy": PolicyRecord(uid=job.uid, version=3, step=3)}
    made: list[EvalRecord] = []
    while True:
        state = JobState(job, History(steps=tuple(steps), evaluations=tuple(made), policies=policies))
        if (run := state.due_evaluation()) is None:
            break
        made.append(eval_record(job, run, EvaluationEnd(1.0, (), {})))
    assert [(one.version, one.step) for one in made] == evaluated


@pytest.mark.parametrize(
    ("rewards", "last", "which", "promoted"),
    [
        ({0: 0.2, 5: 0.9, 9: 0.9, 12: 0.4}, 12, "last", 12),
        ({0: 0.2, 5: 0.9, 9: 0.9, 12: 0.4}, 12, "best", 9),
        ({}, 3, "best", 3),
        ({0: NAN, 5: 0.9, 9: 0.4}, 9, "best", 5),
        ({0: 0.2, 5: NAN, 9: 0.4}, 9, "best", 9),
        ({0: NAN, 5: NAN}, 7, "best", 7),
    ],
)
def test_promotion_takes_the_last_or_the_best_the_later_of_equals_and_none_that_was_lost_to_faults(
    rewards, last, which, promoted
):
    assert best(rewards, last, which) == promoted


def misfit(document, index: int):
    fault = {"fault": FaultClass.ENV, "fault_text": "the job lacks \x1b[2Jcritic", "is_permanent": True}
    return an_episode(document, index, 0, **fault)


def test_an_environment_that_does_not_fit_the_job_fails_it_at_once(document):
    watch = FaultWatch(window=8, max_share=1.0, at_least=8)
    assert watch.permanent == ""
    watch.add(misfit(document(), 0))
    assert watch.permanent == r"the job lacks \x1b[2Jcritic"


def test_an_environment_that_has_worked_is_not_given_up_because_one_sandbox_cannot_load_it(document, play):
    job = document()
    restarted = FaultWatch(window=2, max_share=0.5, at_least=2, has_scored=True)
    running = FaultWatch(window=2, max_share=0.5, at_least=2)
    running.add(play(job, 0, (1.0,))[0])
    for watch in (restarted, running):
        for index in (1, 2):
            watch.add(misfit(job, index))
        assert watch.permanent == ""
        assert "100% of the last 2 episodes were lost to faults" in (watch.verdict() or "")


def trainer(name: str, broken: bool, pool: str = "tiny", agent: str = "policy") -> ReplicaReport:
    key = f"uid-sums.{agent}"
    return ReplicaReport(role="trainer", pool=pool, replica=name, broken={key: WORDS} if broken else {})


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ([], None),
        ([trainer("t0", True)], WORDS),
        ([trainer("t0", True), trainer("t1", False)], None),
        ([trainer("t0", True), trainer("t1", True)], WORDS),
        ([trainer("t0", False), trainer("x", True, pool="other")], None),
    ],
)
def test_a_job_is_given_up_when_every_trainer_of_its_pool_says_so(document, reports, words):
    assert GivenUp().words(document(), reports, 0.0) == words


def test_a_job_of_two_pools_is_given_up_when_every_trainer_of_one_of_them_says_so(document):
    team = document(agents=[{"name": "a"}, {"name": "b", "poolRef": {"name": "big"}}])
    given_up = GivenUp()
    good = trainer("t0", False, "big")
    assert given_up.words(team, [trainer("t0", True, agent="a"), trainer("t1", False), good], 0.0) is None
    reports = [trainer("t0", True, agent="a"), trainer("t1", False), trainer("t0", True, "big", "b")]
    assert given_up.words(team, reports, 1.0) == WORDS, "trainers of two pools may have one name"
    assert given_up.words(team, reports[:2], 1.0) is None


def test_a_job_of_two_agents_is_given_up_when_every_trainer_says_so_of_the_same_one(document):
    team, given_up = document(agents=[{"name": "a"}, {"name": "b"}]), GivenUp()
    first, second = trainer("t0", True, agent="a"), trainer("t1", True, agent="b")
    assert given_up.words(team, [first, second], 0.0) is None
    assert given_up.words(team, [trainer("t0", True, agent="b"), second], 1.0) == WORDS


def test_a_trainer_that_is_being_replaced_may_still_take_the_job_and_one_that_stays_away_may_not(document):
    given_up, job = GivenUp(), document()
    given_up.words(job, [trainer("t0", False), trainer("t1", False)], 1000.0)
    assert given_up.words(job, [trainer("t0", True)], 1000.0 + RETURN_S - 1) is None
    assert given_up.words(job, [trainer("t0", True)], 1000.0 + RETURN_S) == WORDS


def test_a_trainer_that_gave_the_job_up_before_its_pool_was_changed_is_asked_again(document):
    given_up, job = GivenUp(), document()
    given_up.words(job, [trainer("t0", False), trainer("t1", True)], 1000.0)
    assert given_up.words(job, [trainer("t0", True)], 1001.0) is None
    assert given_up.words(job, [trainer("t0", True), trainer("t1", False)], 1002.0) is None
