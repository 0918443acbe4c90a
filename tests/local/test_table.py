import pytest

from marlaas.local.eta import WINDOW_S, ProgressMark, advanced, eta_s
from marlaas.local.idle import AgentActivity, idle
from marlaas.local.plan import ProcessSpec
from marlaas.local.table import (
    COLUMNS,
    JobView,
    ProcessState,
    agent_cells,
    as_json,
    cells,
    duration,
    evaluation,
    faults,
    plain_line,
    status_line,
    versions,
    why,
)
from marlaas_api.messages import AgentProgress, Phase

ROLLOUT = ProcessSpec("rollout", "rollout-0", pool="tiny")
TRAINER = ProcessSpec("trainer", "trainer-0", pool="tiny")
UP = ProcessState(ROLLOUT, started_at=0.0, ready=True)
MARKS = (ProgressMark(0.0, 0), ProgressMark(10.0, 1), ProgressMark(20.0, 2))


def test_a_row_says_how_a_job_stands(document, progress_of):
    rewards = {"reward": 0.5, "eval_before": 0.25, "eval_last": 0.75, "tokens_per_s": 1234.5, "staleness": 0.5}
    done = {"step": 2, "versions": {"policy": 2}, "faults": {"env": 3, "infra": 0}}
    row = cells(JobView(document(), progress_of(document(), **done, **rewards), eta_s=90.0))
    expected = ("team-a/reverse", "Running", "2/3", "2", "0.50", "0.25 → 0.75", "1,234", "0.50", "env 3", "1 m 30 s")
    assert row == expected
    assert cells(JobView(document(), progress_of(document(), phase=Phase.SUCCEEDED), eta_s=9.0))[-1] == "·"


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "·"), (0.4, "0 s"), (59.4, "59 s"), (200.0, "3 m 20 s"), (3900.0, "1 h 05 m")]
)
def test_durations_are_told_as_people_do(seconds, text):
    assert duration(seconds) == text


def test_versions_faults_and_evaluations_are_told_briefly(document, progress_of):
    assert [versions(by) for by in ({}, {"a": -1}, {"a": 0}, {"b": 1, "a": 2})] == ["·", "·", "0", "a 2, b 1"]
    assert [faults(by) for by in ({}, {"env": 0}, {"infra": 2, "env": 1})] == ["0", "0", "env 1, infra 2"]
    assert evaluation(progress_of(document(), eval_before=0.25, eval_last=0.25)) == "0.25"
    assert evaluation(progress_of(document())) == "·"


def test_the_words_of_a_failure_are_shown_and_never_obeyed(document, progress_of):
    failed = progress_of(document(), phase=Phase.FAILED, reason="TooManyFaults", message="\x1b[2Jall is well")
    assert plain_line(JobView(document(), failed)).endswith(r"TooManyFaults: \x1b[2Jall is well")
    assert why("team-a/sums", "TooManyFaults", failed.message, 5) == r"team-a/sums: TooManyFaults: \x1b[2Jall is well"


def test_the_json_of_a_job_has_the_same_keys_as_the_summary_where_they_mean_the_same(document, progress_of):
    content = as_json(JobView(document(), progress_of(document(), eval_before=0.5), eta_s=4.6))
    expected = {"job": "team-a/reverse", "phase": "Running", "evalBefore": 0.5, "etaSeconds": 5}
    assert content.items() >= expected.items()


TEAM = {
    "caller": AgentProgress(reward=0.5, eval_before=0.25, eval_last=0.75, staleness=0.5),
    "reader": AgentProgress(reward=0.125, eval_before=0.5),
    "past": AgentProgress(),
}


def a_team(document, progress_of) -> JobView:
    agents = [{"name": "caller"}, {"name": "reader"}, {"name": "past", "policy": {"of": "caller", "versions": "past"}}]
    job = document(spec={"agents": agents})
    return JobView(job, progress_of(job, step=2, versions={"reader": 1, "caller": 2}, agents=TEAM))


def test_a_job_of_several_agents_has_a_line_of_each(document, progress_of):
    view = a_team(document, progress_of)
    assert cells(view)[3] == "2/1", "versions of the policies, in the order of the manifest"
    assert {len(line) for line in agent_cells(view)} == {len(COLUMNS)}
    assert [[cell for cell in line if cell] for line in agent_cells(view)] == [
        ["  caller", "2", "0.50", "0.25 → 0.75", "0.50"],
        ["  reader", "1", "0.12", "0.50", "0.00"],
        ["  past", "2", "·", "·", "0.00"],
    ]
    assert "; reader: version 1, reward 0.12, eval 0.50, staleness 0.00; past: " in plain_line(view)
    assert as_json(view)["agents"]["caller"] == {
        "reward": 0.5,
        "evalBefore": 0.25,
        "evalLast": 0.75,
        "staleness": 0.5,
    }


def test_a_job_of_one_agent_has_no_line_of_it(document, progress_of):
    view = JobView(document(), progress_of(document(), agents={"policy": TEAM["caller"]}))
    assert agent_cells(view) == []
    assert "agents" not in as_json(view)


@pytest.mark.parametrize(
    ("step", "newest", "num_idle"),
    [(30, 0, 30), (30, 15, 15), (30, 16, None), (2, 0, None), (3, 0, 3), (0, 0, None), (30, None, None)],
)
def test_many_steps_without_signal_are_told(step, newest, num_idle):
    told = idle(step, [AgentActivity("policy", newest, tokens=0)])
    assert [words[: words.index(":")] for words in told] == (
        [] if num_idle is None else [f"{num_idle} of {step} steps had no signal"]
    )


def test_of_several_agents_those_without_signal_or_calls_are_named_and_frozen_ones_need_no_signal():
    team = [
        AgentActivity("learns", 9, tokens=5),
        AgentActivity("flat", 1, tokens=5),
        AgentActivity("unknown", 0),
        AgentActivity("mute", 0, tokens=0),
        AgentActivity("judge", 0, is_trained=False, tokens=5),
        AgentActivity("critic", 0, is_trained=False, tokens=0),
    ]
    told = idle(10, team)
    assert [words[: words.index(":")] for words in told] == [
        "9 of 10 steps had no signal for agent flat",
        "10 of 10 steps had no signal for agent unknown",
        "Agent mute was called in no episode of 10 steps, and has learned nothing",
        "Agent critic was called in no episode of 10 steps",
    ]
    assert idle(2, team) == []


@pytest.mark.parametrize(
    ("marks", "steps", "now", "left_s"),
    [
        ((), 10, 0.0, None),  # no step has been seen to take time
        ((ProgressMark(0.0, 4),), 10, 5.0, None),
        ((ProgressMark(0.0, 0), ProgressMark(50.0, 1), ProgressMark(60.0, 2), ProgressMark(70.0, 3)), 10, 70.0, 70.0),
        (MARKS, 4, 25.0, 15.0),  # between two steps it counts down
        (MARKS, 4, 60.0, 10.0 + 30.0),  # it grows while a job stands still
        ((ProgressMark(0.0, 0), ProgressMark(10.0, 3)), 3, 11.0, None),  # finished
    ],
)
def test_the_remaining_steps_take_as_long_as_those_that_were_seen(marks, steps, now, left_s):
    assert eta_s(marks, steps, now) == (left_s if left_s is None else pytest.approx(left_s))


def test_a_new_step_makes_a_mark_and_of_old_marks_one_to_measure_from_is_kept():
    marks = advanced(advanced(advanced((), 0, 0.0), 0, 5.0), 1, 9.0)
    assert marks == (ProgressMark(0.0, 0), ProgressMark(9.0, 1))
    late = ProgressMark(11.0 + WINDOW_S, 2)
    assert advanced((ProgressMark(0.0, 0), ProgressMark(10.0, 1)), 2, late.at) == (ProgressMark(10.0, 1), late)


def test_processes_that_start_or_have_exited_are_told_before_anything_else():
    starting = [ProcessState(ROLLOUT, 10.0, False), ProcessState(TRAINER, started_at=0.0, ready=True)]
    line = status_line(starting, [], now=33.0)
    assert line == "starting the engine of rollout-0 (tiny); the first time takes about a minute (23 s)"
    slow = ProcessState(ROLLOUT, 1.0, False, last_line="loading shard 3 of 4")
    assert status_line([slow], [], now=121.0).endswith("(2 m 00 s; its log: loading shard 3 of 4)")
    dead = ProcessState(ROLLOUT, None, False, restarts=2, last_words="ValueError: no memory", next_start_at=12.0)
    line = status_line([ProcessState(TRAINER, 0.0, False), dead], [], now=10.0)
    assert line == "rollout-0 (tiny) exited: ValueError: no memory; it restarts in 2 s (exit 2 in a row)"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"phase": Phase.QUEUED, "reason": "WaitingForSlots", "message": "needs 3 adapter slots; 1 of 8 are free"},
            "team-a/reverse is queued: needs 3 adapter slots; 1 of 8 are free",
        ),
        ({}, "all roles are ready; evaluating version 0 and playing the first episodes"),
        ({"step": 1}, "training"),
    ],
)
def test_when_all_processes_run_the_line_says_what_the_job_does(document, progress_of, fields, line):
    assert status_line([UP], [JobView(document(), progress_of(document(), **fields))], now=1.0) == line


def test_a_job_without_any_progress_is_queued_and_has_a_cell_in_every_column(document):
    view = JobView(document())
    assert as_json(view).items() >= {"phase": Phase.QUEUED, "job": "team-a/reverse"}.items()
    assert len(cells(view)) == len(COLUMNS)
