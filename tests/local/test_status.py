from marlaas.local.plan import ProcessSpec
from marlaas.local.table import JobView, ProcessState, status_line
from marlaas_api.messages import Phase

ROLLOUT = ProcessSpec("rollout", "rollout-0", pool="tiny")
TRAINER = ProcessSpec("trainer", "trainer-0", pool="tiny")


def _up(spec):
    return ProcessState(spec, started_at=0.0, ready=True)


def test_what_starts_is_told_with_how_long_it_has_been_starting():
    line = status_line([ProcessState(ROLLOUT, 10.0, False), _up(TRAINER)], [], now=33.0)
    assert line == "starting the engine of rollout-0 (tiny); the first time takes about a minute (23 s)"


def test_a_death_is_told_before_anything_else():
    dead = ProcessState(ROLLOUT, None, False, restarts=2, last_words="ValueError: no memory", next_start_at=12.0)
    line = status_line([ProcessState(TRAINER, 0.0, False), dead], [], now=10.0)
    assert line == "rollout-0 (tiny) exited: ValueError: no memory; it restarts in 2 s (exit 2 in a row)"


def test_a_queued_job_says_what_it_waits_for(document, progress_of):
    queued = progress_of(
        document(), phase=Phase.QUEUED, reason="WaitingForSlots", message="needs 3 adapter slots; 1 of 8 are free"
    )
    line = status_line([_up(ROLLOUT)], [JobView(document(), queued)], now=1.0)
    assert line == "team-a/reverse is queued: needs 3 adapter slots; 1 of 8 are free"


def test_the_time_before_the_first_step_is_explained(document, progress_of):
    line = status_line([_up(ROLLOUT)], [JobView(document(), progress_of(document()))], now=1.0)
    assert line == "all roles are ready; evaluating version 0 and playing the first episodes"


def test_jobs_that_train_are_said_to_train(document, progress_of):
    assert status_line([_up(ROLLOUT)], [JobView(document(), progress_of(document(), step=1))], now=1.0) == "training"
