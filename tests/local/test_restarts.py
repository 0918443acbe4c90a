from marlaas.local.plan import (
    EXIT_INVALID,
    MAX_NEVER_READY,
    MAX_SHORT,
    MIN_READY_S,
    ProcessRun,
    RestartBackoff,
    after,
)

NEVER_READY = ProcessRun(ended_at=50.0, ready_at=None, exit_code=1)
KILLED_EARLY = ProcessRun(ended_at=50.0, ready_at=None, exit_code=-9)
SHORT = ProcessRun(ended_at=51.0, ready_at=50.0, exit_code=1)
GOOD = ProcessRun(ended_at=50.0 + MIN_READY_S, ready_at=50.0, exit_code=-9)


def _all(*runs: ProcessRun) -> RestartBackoff:
    backoff = RestartBackoff()
    for life in runs:
        backoff = after(backoff, life)
    return backoff


def test_the_wait_doubles_with_every_death_in_a_row_and_is_bounded():
    assert [_all(*[SHORT] * n).delay_s for n in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert _all(*[SHORT] * 7).delay_s == 30


def test_after_a_good_life_it_starts_again_at_once():
    assert _all(SHORT, SHORT, GOOD) == RestartBackoff()
    assert RestartBackoff().delay_s == 0


def test_what_never_became_ready_is_given_up_after_a_few_deaths():
    assert not _all(*[NEVER_READY] * (MAX_NEVER_READY - 1)).gives_up
    assert _all(*[NEVER_READY] * MAX_NEVER_READY).gives_up


def test_what_was_killed_while_starting_has_more_patience():
    assert not _all(*[KILLED_EARLY] * MAX_NEVER_READY).gives_up
    assert _all(*[KILLED_EARLY] * MAX_SHORT).gives_up


def test_what_always_dies_right_after_being_ready_is_given_up_too():
    assert _all(*[SHORT] * MAX_SHORT).gives_up


def test_what_only_a_person_can_mend_is_given_up_at_once():
    assert _all(ProcessRun(ended_at=2.0, ready_at=None, exit_code=EXIT_INVALID)).gives_up


def test_what_only_a_person_can_mend_is_given_up_however_slowly_it_started():
    assert _all(ProcessRun(ended_at=51.0, ready_at=50.0, exit_code=EXIT_INVALID)).gives_up


def test_what_was_at_work_before_only_a_person_could_mend_it_is_tried_once_more():
    assert _all(ProcessRun(ended_at=50.0 + MIN_READY_S, ready_at=50.0, exit_code=EXIT_INVALID)) == RestartBackoff()


def test_a_good_life_wipes_out_what_was_before():
    runs = [NEVER_READY] * (MAX_NEVER_READY - 1)
    assert not _all(*runs, GOOD, *runs).gives_up
