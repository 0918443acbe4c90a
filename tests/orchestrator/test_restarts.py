from marlaas_worker.orchestrator.restarts import PAUSE_S, JobRestarts


def test_a_job_may_die_twice_between_two_steps_and_rests_each_time():
    deaths = JobRestarts()
    assert deaths.note("ill", 4, now=10.0)
    assert deaths.rests("ill", 10.0)
    assert not deaths.rests("ill", 10.0 + PAUSE_S)
    assert not deaths.rests("ill", 3.0), "the clock was set back"
    assert not deaths.rests("well", 10.0)
    assert deaths.note("ill", 4, now=20.0)
    assert not deaths.note("ill", 4, now=30.0)


def test_a_finished_step_ends_the_row_and_a_job_that_is_gone_is_forgotten():
    deaths = JobRestarts()
    assert [deaths.note("ill", finished, 0.0) for finished in (4, 4, 5, 5, 5)] == [True, True, True, True, False]
    deaths.keep({"well"})
    assert deaths.note("ill", 5, 0.0)
