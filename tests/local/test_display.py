import io
import json

import pytest
from rich.console import Console

from marlaas.local.display import PLAIN_PERIOD_S, JsonDisplay, LiveDisplay, PlainDisplay, choose, failures
from marlaas.local.report import Report
from marlaas.local.results import JobResult
from marlaas.local.table import JobView
from marlaas_api.messages import Phase


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


def test_where_the_output_goes_decides_how_it_looks():
    assert isinstance(choose(True, io.StringIO()), JsonDisplay)
    assert isinstance(choose(False, io.StringIO()), PlainDisplay)


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
    display = JsonDisplay(out)
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
