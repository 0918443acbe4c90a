"""When a job is evaluated, which version is promoted, and what fails a job: faults, and trainers that gave it up."""

import pytest
from tests.harness import an_episode, identity

from marlaas_api.messages import (
    AgentStep,
    EvalRecord,
    EvalSample,
    FaultClass,
    JobDocument,
    PolicyRecord,
    ReplicaReport,
    StepRecord,
)
from marlaas_api.messages.job_spec import EvaluationSettings
from marlaas_worker.orchestrator.evaluation import best, due
from marlaas_worker.orchestrator.faults import RETURN_S, FaultWatch, GivenUp
from marlaas_worker.orchestrator.job_state import JobState
from marlaas_worker.orchestrator.recorded_totals import History
from marlaas_worker.orchestrator.step_records import EvaluationEnd, eval_record

NAN = float("nan")
WORDS = "turn 3 carries version 9"
PAIR = [{"name": "a"}, {"name": "b"}]


@pytest.mark.parametrize(
    ("tasks", "finished", "expected"),
    [(64, 0, True), (64, 1, False), (64, 10, True), (64, 25, True), (64, 24, False), (0, 0, False)],
)
def test_evaluations_come_first_last_and_every_so_often_if_tasks_are_held_out(tasks, finished, expected):
    assert due(EvaluationSettings(every=10, tasks=tasks), finished, steps=25) is expected


def evaluated(job: JobDocument) -> EvalRecord:
    return EvalRecord(**identity(job), step=0, version=0, at=1.0, reward_mean=0.5, num_episodes=2)


def policies(job: JobDocument, **versions: int) -> dict[str, PolicyRecord]:
    return {name: PolicyRecord(uid=job.uid, version=one, step=one - 1) for name, one in versions.items()}


def step_of(job: JobDocument, step: int, version: int) -> StepRecord:
    figures = {"at": 1.0, "wall_s": 1.0, "reward_mean": 0.5, "reward_std": 0.5, "num_groups": 1, "num_episodes": 2}
    agents = {"policy": AgentStep(outcome="committed", version=version)}
    place = {"step": step, "version": version, "indices": (step,), "agents": agents}
    return StepRecord(**identity(job), **figures, **place, outcome="committed")


def test_in_strict_mode_an_evaluation_is_of_the_versions_after_the_recorded_steps_and_made_once(document):
    """An agent may have committed the next step when the orchestrator comes back, or when an evaluation was put off."""
    job = document(agents=PAIR)
    for ahead in (0, 1):
        run = JobState(job, History(policies=policies(job, a=ahead, b=0))).due_evaluation()
        assert (run.version, run.versions) == (0, {"a": 0, "b": 0})
        again = History(evaluations=(evaluated(job),), policies=policies(job, a=ahead, b=0))
        assert JobState(job, again).due_evaluation() is None


def test_an_evaluation_that_a_restart_finds_after_further_steps_is_of_its_own_step_and_the_next_one_is_due(document):
    """Recorded under the step of the restart, it would count as that step's evaluation, which would then never be made."""
    job = document(steps=2, maxStaleness=1, groupsPerStep=1)
    begun = JobState(job, History(policies=policies(job, policy=0)))
    begun.begin_evaluation(begun.due_evaluation(), 0)
    steps = tuple(step_of(job, step, step + 1) for step in range(2))
    state = JobState(job, History(steps=steps, ledger=begun.ledger(), policies=policies(job, policy=2)))
    assert (state.evaluation.version, state.evaluation.step) == (0, 0)
    sample = EvalSample(index=0, prompt="2 + 2 =", reply="4" * 1000, reward=1.0)
    ended = eval_record(job, state.evaluation, EvaluationEnd(1.0, (sample,), {}))
    state.record_evaluation(ended)
    for one in (state, JobState(job, History(evaluations=(ended,)))):
        assert (one.evaluations[0].step, one.evaluations[0].samples) == (0, ()), "samples are for people"
    last = state.due_evaluation()
    assert (last.version, last.step) == (2, 2)


@pytest.mark.parametrize(("staleness", "expected"), [(0, [(0, 0), (2, 2), (3, 4)]), (1, [(0, 0), (3, 4)])])
def test_no_evaluation_is_skipped_if_steps_pass_before_it_is_asked_for(document, staleness, expected):
    """A strict job evaluates the versions after each due step, even if the evaluation begins late: its seed alone decides which is promoted.

    Steps may be recorded in quick succession (step 2 has no signal here), or while a quota pauses the job. After a restart,
    the same evaluations are due.
    """
    job = document(steps=4, maxStaleness=staleness, groupsPerStep=1)
    steps = tuple(step_of(job, step, version) for step, version in enumerate((1, 2, 2, 3)))
    made: list[EvalRecord] = []
    while True:
        known = History(steps=steps, evaluations=tuple(made), policies=policies(job, policy=3))
        if (run := JobState(job, known).due_evaluation()) is None:
            break
        made.append(eval_record(job, run, EvaluationEnd(1.0, (), {})))
    assert [(one.version, one.step) for one in made] == expected


@pytest.mark.parametrize(
    ("rewards", "last", "which", "promoted"),
    [
        ({0: 0.2, 5: 0.9, 9: 0.9, 12: 0.4}, 12, "last", 12),
        ({0: 0.2, 5: 0.9, 9: 0.9, 12: 0.4}, 12, "best", 9),
        ({}, 3, "best", 3),
        ({0: NAN, 5: 0.9, 9: 0.4}, 9, "best", 5),
        ({0: NAN, 5: NAN}, 7, "best", 7),
    ],
)
def test_promotion_takes_the_last_or_the_best_the_later_of_equals_and_none_that_was_lost_to_faults(
    rewards, last, which, promoted
):
    assert best(rewards, last, which) == promoted


def test_faults_within_the_stated_share_fail_nobody_and_beyond_it_the_last_one_is_told_without_control_characters(
    document, play
):
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
    misfits = [
        an_episode(job, index, 0, fault=FaultClass.ENV, fault_text="lacks \x1b[2Jcritic", is_permanent=True)
        for index in (1, 2)
    ]
    known = JobState(job, History(evaluations=(evaluated(job),))).faults
    fresh, running = FaultWatch(window=8, max_share=1.0, at_least=8), FaultWatch(window=2, max_share=0.5, at_least=2)
    running.add(play(job, 0, (1.0,))[0])
    for watch, permanent in ((fresh, r"lacks \x1b[2Jcritic"), (known, ""), (running, "")):
        for misfit in misfits:
            watch.add(misfit)
        assert watch.permanent == permanent
    assert "100% of the last 2 episodes were lost to faults" in str(running.verdict())


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
