from marlaas_worker.orchestrator.restarts import PAUSE_S, JobRestarts


def test_a_job_may_die_twice_between_two_steps_and_pauses_each_time():
    restarts = JobRestarts()
    assert restarts.note("ill", 4, now=10.0)
    assert restarts.is_pausing("ill", 10.0)
    assert not restarts.is_pausing("ill", 10.0 + PAUSE_S)
    assert not restarts.is_pausing("ill", 3.0), "the clock was set back"
    assert not restarts.is_pausing("well", 10.0)
    assert restarts.note("ill", 4, now=20.0)
    assert not restarts.note("ill", 4, now=30.0)


def test_a_finished_step_ends_the_row_and_a_job_that_is_gone_is_forgotten():
    restarts = JobRestarts()
    assert [restarts.note("ill", finished, 0.0) for finished in (4, 4, 5, 5, 5)] == [True, True, True, True, False]
    restarts.keep({"well"})
    assert restarts.note("ill", 5, 0.0)
