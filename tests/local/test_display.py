"""What people see of a run: rows, lines and JSON, grouped by tenant where there are many jobs, and the closing report."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from marlaas.local.display import PLAIN_PERIOD_S, PlainDisplay, choose, failures, table
from marlaas.local.eta import WINDOW_S, ProgressMark, advanced, eta_s
from marlaas.local.idle import AgentActivity, idle
from marlaas.local.plan import ProcessSpec
from marlaas.local.report import Report
from marlaas.local.results import JobResult
from marlaas.local.table import (
    COLUMNS,
    JobView,
    ProcessState,
    agent_cells,
    as_json,
    cells,
    plain_line,
    status_line,
    why,
)
from marlaas.local.tenants import OmittedJobs, ShareMeter, SharesSoFar, TenantView, by_tenant, rows
from marlaas_api.messages import AgentProgress, Phase, TokenUse, UsageAmounts
from tests import tables


def rendered(renderable, width=140):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue().splitlines()


def _text(renderable):
    return "\n".join(rendered(renderable, 200))


def _plain(now=(0.0,), width=200):
    out = io.StringIO()
    return PlainDisplay(Console(file=out, width=width, color_system=None), lambda: now[0]), out


def test_plain_lines_come_at_a_change_of_phase_and_once_a_period_and_waits_are_told_once(document, progress_of):
    now = [0.0]
    display, out = _plain(now)
    for now[0], step in ((0.0, 0), (1.0, 1), (2.0, 2), (PLAIN_PERIOD_S + 1, 3), (PLAIN_PERIOD_S + 2, 3)):
        display.jobs([JobView(document(), progress_of(document(), step=step))])
    display.jobs([JobView(document(), progress_of(document(), step=3, phase=Phase.SUCCEEDED))])
    told = [line.partition("step ")[2][:3] for line in out.getvalue().splitlines()]
    assert told == ["0/3", "3/3", "3/3"]
    display, out = _plain()
    for text in ("starting the engine (2 s)", "starting the engine (1 m 03 s)", "training"):
        display.waiting(text)
    assert [line[9:] for line in out.getvalue().splitlines()] == ["starting the engine (2 s)", "training"]


def test_json_lines_are_one_object_per_change(document, progress_of):
    out = io.StringIO()
    display = choose(True, out)
    display.waiting("starting")
    for step in (1, 1, 2):
        display.jobs([JobView(document(), progress_of(document(), step=step), eta_s=1.0 + step)])
    display.result(Report([JobResult(document(), progress_of(document(), step=2))], "/out"))
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["type"] for line in lines] == ["status", "progress", "progress", "summary"]
    assert [line.get("step") for line in lines[1:3]] == [1, 2]
    assert lines[-1]["jobs"]["team-a/reverse"]["phase"] == "Running"
    display.refused("pool.yaml:3: no")
    assert json.loads(out.getvalue().splitlines()[-1]) == {"type": "error", "message": "pool.yaml:3: no"}


def test_a_failed_job_says_why_below_the_table(document, progress_of):
    message = "\n".join(["Traceback", *map(str, range(20)), "KeyError: 'x'"])
    failed = progress_of(document(), phase=Phase.FAILED, reason="TooManyFaults", message=message)
    (text,) = failures([JobView(document(), failed), JobView(document(), progress_of(document()))])
    assert text.plain.startswith("team-a/reverse: TooManyFaults: …\n")
    assert text.plain.endswith("\n  KeyError: 'x'")


@pytest.fixture
def team(document, progress_of, evaluation):
    """A job of two agents after ten steps; the second one is never called."""
    job = document(spec={"agents": [{"name": "caller"}, {"name": "reader"}], "training": {"steps": 10}})
    agents = {"caller": AgentProgress(reward=0.31, eval_before=0.11), "reader": AgentProgress(reward=0.0)}
    used = {"caller": UsageAmounts(generated_tokens=5), "reader": UsageAmounts(sandbox_s=1.0)}
    done = progress_of(job, step=10, versions={"caller": 9, "reader": 0}, agents=agents, usage=used)
    first = evaluation(job, 0, 0.05).model_copy(update={"rewards": {"caller": 0.11, "reader": 0.0}})
    return JobResult(job, done, (), (first,))


@pytest.mark.parametrize(("room", "shown"), [(3, True), (2, False)])
def test_agents_of_a_job_have_rows_if_there_is_room(team, room, shown):
    text = _text(table([JobView(team.document, team.progress)], room, 200))
    assert "9/0" in text
    assert ("  caller" in text) is ("  reader" in text) is ("0.31" in text) is shown


def test_the_report_has_the_scores_of_each_agent_and_names_one_that_was_never_called(team, tmp_path):
    text = _text(Report([team], tmp_path).rich())
    (caller,) = (line.split() for line in text.splitlines() if line.strip().startswith("caller"))
    assert caller == ["caller", "9", "0.11", "·"]
    assert "team-a/reverse: Agent reader was called in no episode of 10 steps" in text
    assert "signal" not in text


@pytest.mark.parametrize("name", ["adapter", "curve.png", "steps.jsonl", "logs"])
def test_the_report_names_what_is_there(tmp_path, document, progress_of, name):
    path = tmp_path / "team-a" / "reverse" / name
    path.mkdir(parents=True)
    report = Report([JobResult(document(), progress_of(document()))], tmp_path)
    assert [place for _, place in report.places(report.results[0])] == [path]
    assert str(path) in _text(report.rich())


ROLLOUT = ProcessSpec("rollout", "rollout-0", pool="tiny")
TRAINER = ProcessSpec("trainer", "trainer-0", pool="tiny")
UP = ProcessState(ROLLOUT, started_at=0.0, ready=True)


def test_a_row_says_how_a_job_stands_and_words_of_a_failure_are_shown_and_never_obeyed(document, progress_of):
    rewards = {"reward": 0.5, "eval_before": 0.25, "eval_last": 0.75, "tokens_per_s": 1234.5, "staleness": 0.5}
    done = {"step": 2, "versions": {"policy": 2}, "faults": {"env": 3, "infra": 0}}
    row = cells(JobView(document(), progress_of(document(), **done, **rewards), eta_s=90.0))
    expected = ("team-a/reverse", "Running", "2/3", "2", "0.50", "0.25 → 0.75", "1,234", "0.50", "env 3", "1 m 30 s")
    assert row == expected
    assert cells(JobView(document(), progress_of(document(), phase=Phase.SUCCEEDED), eta_s=9.0))[-1] == "·"
    failed = progress_of(document(), phase=Phase.FAILED, reason="TooManyFaults", message="\x1b[2Jall is well")
    waits = progress_of(document(), reason="StoreFull", message="\x1b[2Jall is well")
    assert plain_line(JobView(document(), waits)).endswith(r"StoreFull: \x1b[2Jall is well")
    assert plain_line(JobView(document(), failed)).endswith(r"TooManyFaults: \x1b[2Jall is well")
    assert why("team-a/sums", "TooManyFaults", failed.message, 5) == r"team-a/sums: TooManyFaults: \x1b[2Jall is well"


def test_a_job_of_several_agents_has_a_line_of_each(document, progress_of):
    job = document(spec={"agents": tables.data(__file__, "team")})
    agents = tables.data(__file__, "team_progress")
    view = JobView(job, progress_of(job, step=2, versions={"reader": 1, "caller": 2}, agents=agents))
    assert cells(view)[3] == "2/1", "versions of the policies, in the order of the manifest"
    assert {len(line) for line in agent_cells(view)} == {len(COLUMNS)}
    assert [[cell for cell in line if cell] for line in agent_cells(view)] == tables.data(__file__, "lines_of_agents")
    assert "; reader: version 1, reward 0.12, eval 0.50, staleness 0.00; past: " in plain_line(view)
    assert as_json(view)["agents"]["caller"] == {"reward": 0.5, "evalBefore": 0.25, "evalLast": 0.75, "staleness": 0.5}


@pytest.mark.parametrize(("step", "newest", "num_idle"), tables.rows(__file__, "idle_steps"))
def test_many_steps_without_signal_are_told(step, newest, num_idle):
    told = idle(step, [AgentActivity("policy", newest, tokens=0)])
    assert [words[: words.index(":")] for words in told] == (
        [] if num_idle is None else [f"{num_idle} of {step} steps trained no token"]
    )
    (told,) = idle(9, [AgentActivity("policy", 2, tokens=5, untrained={"flat": 1, "filtered": 6})])
    assert told.startswith("7 of 9 steps trained no token: in 6, training.overlong.filter left out all replies")
    assert "; in 1, all episodes of a task earned the same reward" in told


def test_of_several_agents_those_without_signal_or_calls_are_named_and_frozen_ones_need_no_signal():
    team = [AgentActivity(**one) for one in tables.data(__file__, "activities")]
    told = idle(10, team)
    assert [words[: words.index(":")] for words in told] == tables.data(__file__, "idle_agents")
    assert idle(2, team) == []


@pytest.mark.parametrize(("marks", "steps", "now", "left_s"), tables.rows(__file__, "remaining"))
def test_the_remaining_steps_take_as_long_as_those_that_were_seen(marks, steps, now, left_s):
    marks = tuple(ProgressMark(*mark) for mark in marks)
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


@pytest.mark.parametrize(("fields", "line"), tables.rows(__file__, "status_lines"))
def test_when_all_processes_run_the_line_says_what_the_job_does(document, progress_of, fields, line):
    assert status_line([UP], [JobView(document(), progress_of(document(), **fields))], now=1.0) == line


def test_a_job_without_any_progress_is_queued_and_has_a_cell_in_every_column(document):
    view = JobView(document())
    assert as_json(view).items() >= {"phase": Phase.QUEUED, "job": "team-a/reverse"}.items()
    assert len(cells(view)) == len(COLUMNS)


USED = UsageAmounts.generated({TokenUse.TRAINED: 60, TokenUse.ZERO_VARIANCE: 10})
PHASES = [Phase.SUCCEEDED, Phase.QUEUED, *[Phase.RUNNING] * 5, Phase.FAILED]


@pytest.fixture
def views(document, progress_of):
    """Eight jobs of each of four tenants with weights 1, 1, 2 and 4; the tokens per second of a running job are 10."""

    def of(tenant, weight, number):
        name = f"job-{number}"
        job = document(name, namespace=tenant, uid=f"{tenant}-{name}", tenant=tenant, tenant_weight=weight)
        speed = 10.0 if PHASES[number] is Phase.RUNNING else 0.0
        done = {"step": number % 3, "tokens_per_s": speed, "tokens": 100, "usage": {"policy": USED}}
        return JobView(job, progress_of(job, phase=PHASES[number], **done))

    return [of(f"team-{at}", weight, number) for at, weight in enumerate((1, 1, 2, 4)) for number in range(8)]


def test_shares_are_by_weight_among_tenants_with_running_jobs_and_failed_jobs_come_first(views):
    tenants = by_tenant(views)
    assert [one.entitled for one in tenants] == pytest.approx([1 / 8, 1 / 8, 2 / 8, 4 / 8])
    assert [one.received for one in tenants] == pytest.approx([1 / 4] * 4), "by tokens"
    phases = [view.progress.phase for view in tenants[0].jobs]
    assert phases == [Phase.FAILED, *[Phase.RUNNING] * 5, Phase.QUEUED, Phase.SUCCEEDED]
    idle = [view for view in views if view.document.tenant == "team-3" and view.progress.phase is not Phase.RUNNING]
    without = by_tenant([view for view in views if view.document.tenant != "team-3"] + idle)
    assert [one.entitled for one in without] == [1 / 4, 1 / 4, 2 / 4, None]
    assert {one.entitled for one in by_tenant([replace(view, is_weight_known=False) for view in views])} == {None}


@pytest.mark.parametrize(("room", "num_jobs"), [(100, 32), (36, 32), (35, 24), (24, 16), (12, 4), (2, 4)])
def test_rows_fit_into_the_room_but_every_tenant_shows_a_job(views, room, num_jobs):
    found = rows(views, room)
    assert sum(isinstance(row, JobView) for row in found) == num_jobs
    assert len(found) <= max(room, 12)
    omitted = sum(row.num for row in found if isinstance(row, OmittedJobs))
    assert num_jobs + omitted == len(views)
    assert sum(isinstance(row, TenantView) for row in found) == 4
    assert rows(views[:8], room) == tuple(views[:8]), "few jobs are rows of their own"


def test_the_live_table_of_many_jobs_has_the_use_of_each_tenant_and_fits_the_terminal(views):
    lines = rendered(table(views, 24, 120), 120)
    assert len(lines) <= 25
    # of eight jobs of 100 tokens: 480 trained, 80 without variance, and the 60 unrecorded ones of the two that have ended
    (told,) = [line.split() for line in lines if line.startswith("team-3 ")]
    assert told[2:] == ["25%", "(50%)", "7/24", "50", "800", "60%", "18%"]
    assert any("… 4 more" in line and "2 running, 1 queued, 1 …" in line for line in lines)


def test_shares_so_far_count_tokens_by_the_shares_that_held_while_they_were_generated(views):
    meter = ShareMeter()
    meter.see(views)
    assert meter.sums == {}
    # team-0 generates the next 300 tokens and ends; it was entitled to an eighth of them
    first, ended = [view.document.tenant == "team-0" for view in views], {"phase": Phase.SUCCEEDED}
    more = [300 if view.document.uid == "team-0-job-2" else 0 for view in views]
    meter.see(
        [_later(view, *later, ended if over else {}) for view, *later, over in zip(views, more, first, strict=True)]
    )
    assert meter.sums["team-0"] == SharesSoFar(300, 300 / 8, 300)
    assert meter.sums["team-3"] == SharesSoFar(0, 300 / 2, 300)


def _later(view, tokens, fields):
    return replace(view, progress=view.progress.model_copy(update={"tokens": 100 + tokens, **fields}))
