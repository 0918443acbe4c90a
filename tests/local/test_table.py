import pytest

from marlaas.local.table import (
    COLUMNS,
    JobView,
    as_json,
    cells,
    duration,
    evaluation,
    faults,
    plain_line,
    versions,
    why,
    without_signal,
)
from marlaas_api.messages import Phase


def test_every_column_has_a_cell_before_and_after_the_orchestrator_has_spoken(document, progress_of):
    assert len(cells(JobView(document()))) == len(COLUMNS)
    assert len(cells(JobView(document(), progress_of(document())))) == len(COLUMNS)


def test_a_row_says_how_a_job_stands(document, progress_of):
    progress = progress_of(
        document(),
        step=2,
        versions={"policy": 2},
        reward=0.5,
        eval_before=0.25,
        eval_last=0.75,
        tokens_per_s=1234.5,
        staleness=0.5,
        faults={"env": 3, "infra": 0},
    )
    row = cells(JobView(document(), progress, eta_s=90.0))
    expected = ("team-a/reverse", "Running", "2/3", "2", "0.50", "0.25 → 0.75", "1,234", "0.50", "env 3", "1 m 30 s")
    assert row == expected


def test_a_finished_job_has_no_eta(document, progress_of):
    assert cells(JobView(document(), progress_of(document(), phase=Phase.SUCCEEDED), eta_s=9.0))[-1] == "·"


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "·"), (0.4, "0 s"), (59.4, "59 s"), (200.0, "3 m 20 s"), (3900.0, "1 h 05 m")]
)
def test_durations_are_told_as_people_do(seconds, text):
    assert duration(seconds) == text


def test_versions_before_the_first_are_a_dot_and_several_agents_are_named():
    assert [versions(by) for by in ({}, {"a": -1}, {"a": 0}, {"b": 1, "a": 2})] == ["·", "·", "0", "a 2, b 1"]


def test_faults_are_told_by_class_and_only_those_there_are():
    assert [faults(by) for by in ({}, {"env": 0}, {"infra": 2, "env": 1})] == ["0", "0", "env 1, infra 2"]


def test_one_evaluation_is_told_once(document, progress_of):
    assert evaluation(progress_of(document(), eval_before=0.25, eval_last=0.25)) == "0.25"
    assert evaluation(progress_of(document())) == "·"


def test_a_plain_line_of_a_failed_job_says_why(document, progress_of):
    failed = progress_of(document(), phase=Phase.FAILED, reason="TooManyFaults", message="ValueError: no such word")
    assert plain_line(JobView(document(), failed)).endswith("TooManyFaults: ValueError: no such word")


def test_the_words_of_a_failure_are_shown_and_never_obeyed(document, progress_of):
    failed = progress_of(document(), phase=Phase.FAILED, reason="TooManyFaults", message="\x1b[2Jall is well")
    assert plain_line(JobView(document(), failed)).endswith(r"TooManyFaults: \x1b[2Jall is well")
    assert why("team-a/sums", "TooManyFaults", failed.message, 5) == r"team-a/sums: TooManyFaults: \x1b[2Jall is well"


def test_the_json_of_a_job_has_the_same_keys_as_the_summary_where_they_mean_the_same(document, progress_of):
    content = as_json(JobView(document(), progress_of(document(), eval_before=0.5), eta_s=4.6))
    assert (content["job"], content["phase"], content["evalBefore"], content["etaSeconds"]) == (
        "team-a/reverse",
        "Running",
        0.5,
        5,
    )


@pytest.mark.parametrize(
    ("step", "newest", "idle"),
    [(30, 0, 30), (30, 15, 15), (30, 16, None), (2, 0, None), (3, 0, 3), (0, 0, None), (30, None, None)],
)
def test_many_steps_without_signal_are_told(step, newest, idle):
    words = without_signal(step, newest)
    assert words.startswith(f"{idle} of {step} steps had no signal: ") if idle is not None else words == ""
