import pytest

from marlaas_api.messages.job_spec import EvaluationSettings
from marlaas_worker.orchestrator.evaluation import best, due
from marlaas_worker.orchestrator.faults import FaultWatch


@pytest.mark.parametrize(("finished", "expected"), [(0, True), (1, False), (10, True), (25, True), (24, False)])
def test_evaluations_come_first_last_and_every_so_often(finished, expected):
    assert due(EvaluationSettings(every=10, tasks=64), finished, steps=25) is expected


def test_no_held_out_tasks_no_evaluation():
    assert not due(EvaluationSettings(every=1, tasks=0), 0, steps=5)


def test_promotion_takes_the_last_or_the_best_and_the_later_of_equals():
    rewards = {0: 0.2, 5: 0.9, 9: 0.9, 12: 0.4}
    assert best(rewards, 12, "last") == 12
    assert best(rewards, 12, "best") == 9
    assert best({}, 3, "best") == 3


def test_an_evaluation_lost_to_faults_is_never_the_best():
    lost = float("nan")
    assert best({0: lost, 5: 0.9, 9: 0.4}, 9, "best") == 5
    assert best({0: 0.2, 5: lost, 9: 0.4}, 9, "best") == 9
    assert best({0: lost, 5: lost}, 7, "best") == 7


def test_an_environment_that_always_fails_fails_the_job_in_its_own_words(document, play):
    watch = FaultWatch(window=8, max_share=0.5, at_least=2)
    first, second = play(document(), 0, (None, None))
    watch.add(first)
    assert watch.verdict() is None
    watch.add(second)
    assert watch.verdict() == "100% of the last 2 episodes were lost to faults; the last one: env: KeyError: 'x'"


def test_faults_within_the_stated_share_fail_nobody(document, play):
    watch = FaultWatch(window=4, max_share=0.5, at_least=2)
    for episode in [*play(document(), 0, (None, None)), *play(document(), 1, (1.0, 1.0))]:
        watch.add(episode)
    assert watch.verdict() is None


def test_a_fault_is_told_without_what_a_terminal_would_obey(document, play):
    """It ends in the job's status, and so in the terminal of whoever lists jobs."""
    watch = FaultWatch(window=2, max_share=0.5, at_least=1)
    watch.add(play(document(), 0, (None, None))[0].model_copy(update={"fault_text": "\x1b[2Jall is well"}))
    assert watch.verdict() == r"100% of the last 1 episodes were lost to faults; the last one: env: \x1b[2Jall is well"
