import io
import json

import pytest
from rich.console import Console

from marlaas.local.display import PLAIN_PERIOD_S, LiveDisplay, PlainDisplay, choose, failures, table
from marlaas.local.report import Report
from marlaas.local.results import JobResult
from marlaas.local.table import JobView
from marlaas_api.messages import AgentProgress, Phase, UsageAmounts


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def _text(renderable):
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def _plain(clock=None):
    out = io.StringIO()
    return PlainDisplay(Console(file=out, width=200, color_system=None), clock or Clock()), out


def test_plain_lines_come_at_a_change_of_phase_and_once_a_period(document, progress_of):
    clock = Clock()
    display, out = _plain(clock)
    for clock.now, step in ((0.0, 0), (1.0, 1), (2.0, 2), (PLAIN_PERIOD_S + 1, 3), (PLAIN_PERIOD_S + 2, 3)):
        display.jobs([JobView(document(), progress_of(document(), step=step))])
    display.jobs([JobView(document(), progress_of(document(), step=3, phase=Phase.SUCCEEDED))])
    told = [line.partition("step ")[2][:3] for line in out.getvalue().splitlines()]
    assert told == ["0/3", "3/3", "3/3"]


def test_what_is_waited_for_is_told_once_although_its_seconds_run():
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


def test_the_live_table_leaves_the_terminal_as_it_was(document, progress_of):
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    display = LiveDisplay(console)
    display.waiting("preparing model tiny", 0.4)
    display.jobs([JobView(document(), progress_of(document()))])
    display.close()
    display.close()
    assert "\x1b[?25h" in console.file.getvalue()


@pytest.fixture
def team(document, progress_of, evaluation) -> JobResult:
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


def test_the_report_shows_replies_before_and_after(document, progress_of, evaluation, tmp_path):
    evals = (evaluation(document(), 0, 0.0, ("olleh", "")), evaluation(document(), 3, 1.0, ("hello", "dlrow\nx")))
    done = progress_of(document(), phase=Phase.SUCCEEDED, versions={"policy": 3})
    text = _text(Report([JobResult(document(), done, (), evals)], tmp_path).rich())
    for shown in ("p0", "olleh (0.00)", "hello (1.00)", "(nothing) (0.00)", "dlrow x (1.00)"):
        assert shown in text


def test_the_report_tells_of_a_job_that_succeeded_and_learnt_nothing(document, progress_of, tmp_path):
    done = progress_of(document(), phase=Phase.SUCCEEDED, step=3, versions={"policy": 0})
    assert "3 of 3 steps had no signal" in _text(Report([JobResult(document(), done)], tmp_path).rich())
