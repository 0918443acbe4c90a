"""What came of a run's jobs: the summary, replies side by side, and curves, drawn by a process of their own."""

import asyncio
import hashlib
import io
import json
import logging
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console
from tests.harness import a_step
from tests.local.runs import share_of

from marlaas.local.collection import with_last_fault
from marlaas.local.curves import CurveDrawer, CurveRequest
from marlaas.local.folder import ModuleFile, OutFolder
from marlaas.local.modules import changed_modules, module_files
from marlaas.local.report import Report
from marlaas.local.results import Failure, JobResult, all_succeeded, exchanges, summary
from marlaas.plots.figure import CURVE_FILE, draw_curve
from marlaas_api.cpu_shares import FULL_SHARE, LEAST_SHARE
from marlaas_api.messages import Phase


def _done(progress_of, document, **fields):
    done = {"phase": Phase.SUCCEEDED, "step": 3, "versions": {"policy": 3}, "started_at": 10.0, "finished_at": 70.5}
    return progress_of(document(), **{**done, **fields})


def test_the_last_fault_of_the_recorded_episodes_is_in_the_closing_report(document, progress_of, tmp_path):
    out = OutFolder(tmp_path)
    file = out.job(document().ref) / "episodes.jsonl"
    file.parent.mkdir(parents=True)
    frame = 'Traceback (most recent call last):\n  File "game.py", line 3, in play\n    score()\n'
    traceback = f"{frame}KeyError: 'b'\n  in row 3"
    lines = [{"fault_text": "KeyError: 'a'"}, {"fault_text": traceback}, {"fault": None}]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = _done(progress_of, document, faults={"env": 3, "infra": 1}, warnings={"NoSignal": "9 of 10"})
    result = with_last_fault(out, JobResult(document(), done))
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(Report([result], tmp_path).rich())
    sentence = "4 faults (env 3, infra 1), and no mean contains an episode with a fault; the last one: KeyError: 'b'\n"
    text = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    assert f"team-a/reverse: {sentence}" in text
    assert "team-a/reverse: NoSignal: 9 of 10\n" in text


def test_a_run_that_is_continued_with_other_code_of_an_environment_says_both_digests(document, tmp_path):
    suites = [{"name": "held", "environment": {"name": "pack.game:play"}}, {"name": "plain"}]
    job = document(spec={"environment": {"name": "pack.game:play"}, "evaluation": {"suites": suites}})
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    found = []
    for code in ("a = 1", "a = 2"):
        (tmp_path / "pack" / "game.py").write_text(code)
        found.append(module_files([job, document("builtin")], {job.ref.key: tmp_path}))
    (was, now) = (one[job.ref.key] for one in found)
    assert was == ModuleFile(file=str(tmp_path / "pack" / "game.py"), sha256=hashlib.sha256(b"a = 1").hexdigest())
    note, of_suite = changed_modules(*found)
    assert "the environment of suite held has changed" in of_suite
    assert (was.sha256 in note, now.sha256 in note, list(changed_modules(found[0], found[0]))) == (True, True, [])


def test_the_published_version_and_its_evaluation_count_not_the_last(document, progress_of, evaluation):
    evals = tuple(evaluation(document(), version, mean) for version, mean in ((0, 0.1), (2, 0.9), (3, 0.6)))
    result = JobResult(document(), _done(progress_of, document, promoted={"policy": 2}), (), evals)
    entry = summary([result])["jobs"]["team-a/reverse"]
    assert (entry["policyVersion"], entry["evalAfter"]) == (2, 0.9)
    untrained = JobResult(document(), _done(progress_of, document, eval_last=0.1), (), evals[:1])
    entry = summary([untrained])["jobs"]["team-a/reverse"]
    assert (entry["evalBefore"], entry["evalAfter"]) == (0.1, None), "version 0 is not after training"


def test_of_several_agents_the_summary_has_the_team_and_each(document, progress_of, evaluation):
    """The record's version is the sum of the agents': the last evaluation is that of 3 + 2, not the one of version 3."""
    job = document(spec={"agents": [{"name": "solver"}, {"name": "verifier"}]})
    rewards = {0: {"solver": 0.2, "verifier": 0.0}, 3: {}, 5: {"solver": 0.7, "verifier": 0.5}}
    means = {0: 0.1, 3: 0.9, 5: 0.6}
    evals = tuple(evaluation(job, at, means[at]).model_copy(update={"rewards": own}) for at, own in rewards.items())
    progress = _done(progress_of, document, versions={"solver": 3, "verifier": 2})
    entry = summary([JobResult(job, progress, (), evals)])["jobs"]["team-a/reverse"]
    assert (entry["evalBefore"], entry["evalAfter"], entry["policyVersion"]) == (0.1, 0.6, 5)
    assert entry["agents"] == {
        "solver": {"evalBefore": 0.2, "evalAfter": 0.7, "policyVersion": 3},
        "verifier": {"evalBefore": 0.0, "evalAfter": 0.5, "policyVersion": 2},
    }


def test_a_job_that_failed_was_given_up_or_never_began_is_no_success_and_says_why(document, progress_of):
    why = {"reason": "TooManyFaults", "message": "KeyError: 'x'"}
    failed = JobResult(document(), _done(progress_of, document, phase=Phase.FAILED, **why))
    failure = Failure("RoleFailed", "rollout-0 (tiny) exited: no memory")
    given_up = JobResult(document(), progress_of(document()), failure=failure)
    for result, expected in (
        (failed, {"phase": "Failed", **why}),
        (given_up, {"phase": "Failed", "reason": "RoleFailed"}),
        (JobResult(document()), {"phase": "Queued"}),
    ):
        assert summary([result])["jobs"]["team-a/reverse"].items() >= expected.items()
        assert not all_succeeded([result])


def test_replies_are_paired_by_task_only_five_and_not_without_a_second_evaluation(document, progress_of, evaluation):
    before = evaluation(document(), 0, 0.1, tuple(f"before {i}" for i in range(7)))
    after = evaluation(document(), 3, 0.9, tuple(f"after {i}" for i in range(6)))
    pairs = exchanges(JobResult(document(), _done(progress_of, document), (), (before, after)))
    replies = [(pair.before.reply, pair.after.reply) for pair in pairs]
    assert replies == [(f"before {i}", f"after {i}") for i in range(5)]
    result = JobResult(document(), progress_of(document()), (), (evaluation(document(), 0, math.nan, ("x",)),))
    assert exchanges(result) == ()
    entry = summary([result])["jobs"]["team-a/reverse"]
    assert entry["evalBefore"] is entry["evalAfter"] is None


def _size(png):
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_a_curve_is_a_png_whatever_the_job_has_recorded(document, evaluation):
    steps = [a_step(document(), n, staleness_mean=0.5, staleness_max=1, metrics={"tokens": 512.0}) for n in range(5)]
    evals = [evaluation(document(), 0, 0.1), evaluation(document(), 5, 0.9)]
    width, height = _size(draw_curve("team-a/reverse", steps, evals, 8))
    assert width >= 1000
    assert height >= 700
    assert _size(draw_curve("team-a/reverse", [], [], 8))
    assert _size(draw_curve("team-a/reverse", [], evals[:1], 8))
    assert _size(draw_curve("team-a/reverse", [a_step(document(), 0, num_groups=0)], [], 8))


LEAST = LEAST_SHARE if Path("/proc/self/autogroup").exists() else FULL_SHARE
"""Share of a process that no job waits for, where the kernel has shares of sessions."""


@dataclass
class Sessions:
    """Stands for the watchdog: the sessions that have begun and not ended. shares: their niceness when they begin."""

    open: set[int] = field(default_factory=set)
    shares: list[int] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, session):
        self.began.set()
        self.open.add(session)
        self.shares.append(share_of(session))

    def remove(self, session):
        self.open.remove(session)


@pytest.fixture
def request_of(tmp_path, document, evaluation):
    def recorded(name):
        folder = tmp_path / name
        folder.mkdir()
        lines = [a_step(document(name), number).model_dump_json() for number in range(3)]
        (folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "evals.jsonl").write_text(evaluation(document(name), 0, 0.1).model_dump_json() + "\n")
        return CurveRequest(f"team-a/{name}", folder, 8)

    return recorded


@pytest.mark.processes
async def test_all_requested_curves_are_drawn_and_an_interrupted_run_does_not_wait_for_them(request_of, caplog):
    sessions, first, broken, last = Sessions(), request_of("first"), request_of("broken"), request_of("last")
    (broken.folder / "steps.jsonl").write_text("no record\n")
    with caplog.at_level(logging.WARNING):
        async with CurveDrawer(sessions) as curves:
            for request in (first, broken, last):
                curves.add(request)
                await sessions.began.wait()
            draining = asyncio.create_task(curves.drain())
            await asyncio.sleep(0)
            assert [share_of(one) for one in sessions.open] == [FULL_SHARE], "the user waits for it now"
            await draining
    assert [(one.folder / CURVE_FILE).exists() for one in (first, broken, last)] == [True, False, True]
    assert (last.folder / CURVE_FILE).read_bytes().startswith(b"\x89PNG")
    assert "team-a/broken" in caplog.text
    assert not sessions.open
    assert sessions.shares == [LEAST, FULL_SHARE], "the first batch begins while jobs run"
    sessions = Sessions()
    async with CurveDrawer(sessions) as curves:
        curves.add(request_of("a"))
    assert not sessions.open
