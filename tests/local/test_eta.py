import pytest

from marlaas.local.table import WINDOW_S, ProgressMark, advanced, eta_s


def test_there_is_none_before_a_step_has_been_seen_to_take_time():
    assert eta_s((), 10, 0.0) is None
    assert eta_s((ProgressMark(0.0, 4),), 10, 5.0) is None


def test_what_is_left_takes_as_long_as_what_was_seen():
    marks = (ProgressMark(0.0, 0), ProgressMark(50.0, 1), ProgressMark(60.0, 2), ProgressMark(70.0, 3))
    assert eta_s(marks, 10, 70.0) == pytest.approx(70.0)


def test_it_counts_down_between_two_steps():
    marks = (ProgressMark(0.0, 0), ProgressMark(10.0, 1), ProgressMark(20.0, 2))
    assert eta_s(marks, 4, 25.0) == pytest.approx(15.0)


def test_a_job_that_stands_still_has_a_growing_eta():
    marks = (ProgressMark(0.0, 0), ProgressMark(10.0, 1), ProgressMark(20.0, 2))
    assert eta_s(marks, 4, 60.0) == pytest.approx(10.0 + 30.0)


def test_a_finished_job_has_none():
    assert eta_s((ProgressMark(0.0, 0), ProgressMark(10.0, 3)), 3, 11.0) is None


def test_only_a_new_step_makes_a_mark():
    marks = advanced(advanced(advanced((), 0, 0.0), 0, 5.0), 1, 9.0)
    assert marks == (ProgressMark(0.0, 0), ProgressMark(9.0, 1))


def test_old_marks_are_forgotten_but_for_one_to_measure_from():
    assert advanced((ProgressMark(0.0, 0), ProgressMark(10.0, 1)), 2, 11.0 + WINDOW_S) == (
        ProgressMark(10.0, 1),
        ProgressMark(11.0 + WINDOW_S, 2),
    )
