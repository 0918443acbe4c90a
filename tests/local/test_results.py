import math
import struct

from marlaas.local.results import Failure, JobResult, all_succeeded, exchanges, summary
from marlaas.plots.figure import draw_curve
from marlaas_api.messages import Phase


def _done(progress_of, document, **fields):
    done = {"phase": Phase.SUCCEEDED, "step": 3, "versions": {"policy": 3}, "started_at": 10.0, "finished_at": 70.5}
    return progress_of(document(), **{**done, **fields})


def test_the_summary_of_a_job_says_what_came_of_it(document, progress_of, evaluation):
    evals = (evaluation(document(), 0, 0.25), evaluation(document(), 3, 0.75))
    result = JobResult(document(), _done(progress_of, document, faults={"env": 2}), (), evals)
    evals = {"evalBefore": 0.25, "evalAfter": 0.75}
    done = {"phase": "Succeeded", "steps": 3, "policyVersion": 3, "wallSeconds": 60.5}
    entry = {**done, **evals, "faults": {"env": 2}, "trainingFaults": {}}
    assert summary([result]) == {"jobs": {"team-a/reverse": entry}}


def test_the_published_version_and_its_evaluation_count_not_the_last(document, progress_of, evaluation):
    evals = tuple(evaluation(document(), version, mean) for version, mean in ((0, 0.1), (2, 0.9), (3, 0.6)))
    result = JobResult(document(), _done(progress_of, document, promoted={"policy": 2}), (), evals)
    entry = summary([result])["jobs"]["team-a/reverse"]
    assert (entry["policyVersion"], entry["evalAfter"]) == (2, 0.9)


def test_of_several_agents_the_summary_has_the_team_and_each(document, progress_of, evaluation):
    """The record's version is the sum of the agents': the last evaluation is that of 3 + 2, not the one of version 3."""
    job = document(spec={"agents": [{"name": "solver"}, {"name": "verifier"}]})
    evals = tuple(
        evaluation(job, version, team).model_copy(update={"rewards": rewards})
        for version, team, rewards in (
            (0, 0.1, {"solver": 0.2, "verifier": 0.0}),
            (3, 0.9, {}),
            (5, 0.6, {"solver": 0.7, "verifier": 0.5}),
        )
    )
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


def test_replies_are_paired_by_task_and_only_five(document, progress_of, evaluation):
    before = evaluation(document(), 0, 0.1, tuple(f"before {i}" for i in range(7)))
    after = evaluation(document(), 3, 0.9, tuple(f"after {i}" for i in range(6)))
    pairs = exchanges(JobResult(document(), _done(progress_of, document), (), (before, after)))
    replies = [(pair.before.reply, pair.after.reply) for pair in pairs]
    assert replies == [(f"before {i}", f"after {i}") for i in range(5)]


def test_without_a_second_evaluation_there_is_nothing_to_pair_and_the_mean_of_nothing_is_null(
    document, progress_of, evaluation
):
    result = JobResult(document(), progress_of(document()), (), (evaluation(document(), 0, math.nan, ("x",)),))
    assert exchanges(result) == ()
    entry = summary([result])["jobs"]["team-a/reverse"]
    assert entry["evalBefore"] is entry["evalAfter"] is None


def _size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_a_curve_is_a_png_whatever_the_job_has_recorded(document, step, evaluation):
    steps = [step(document(), n, staleness_mean=0.5, staleness_max=1, metrics={"tokens": 512.0}) for n in range(5)]
    evals = [evaluation(document(), 0, 0.1), evaluation(document(), 5, 0.9)]
    width, height = _size(draw_curve("team-a/reverse", steps, evals, 8))
    assert width >= 1000
    assert height >= 700
    assert _size(draw_curve("team-a/reverse", [], [], 8))
    assert _size(draw_curve("team-a/reverse", [], evals[:1], 8))
    assert _size(draw_curve("team-a/reverse", [step(document(), 0, num_groups=0)], [], 8))
