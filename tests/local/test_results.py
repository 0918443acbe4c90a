import math

from marlaas.local.report import Failure, JobResult, all_succeeded, exchanges, summary
from marlaas_api.messages import Phase


def _done(progress_of, document, **fields):
    return progress_of(
        document(),
        **{
            "phase": Phase.SUCCEEDED,
            "step": 3,
            "versions": {"policy": 3},
            "started_at": 10.0,
            "finished_at": 70.5,
            **fields,
        },
    )


def test_the_summary_of_a_job_says_what_came_of_it(document, progress_of, evaluation):
    evals = (evaluation(document(), 0, 0.25), evaluation(document(), 3, 0.75))
    result = JobResult(document(), _done(progress_of, document, faults={"env": 2}), (), evals)
    assert summary([result]) == {
        "jobs": {
            "team-a/reverse": {
                "phase": "Succeeded",
                "evalBefore": 0.25,
                "evalAfter": 0.75,
                "steps": 3,
                "policyVersion": 3,
                "wallSeconds": 60.5,
                "faults": {"env": 2},
                "trainingFaults": {},
            }
        }
    }


def test_the_published_version_and_its_evaluation_count_not_the_last(document, progress_of, evaluation):
    evals = tuple(evaluation(document(), version, mean) for version, mean in ((0, 0.1), (2, 0.9), (3, 0.6)))
    result = JobResult(document(), _done(progress_of, document, promoted={"policy": 2}), (), evals)
    entry = summary([result])["jobs"]["team-a/reverse"]
    assert (entry["policyVersion"], entry["evalAfter"]) == (2, 0.9)


def test_the_mean_of_nothing_is_null_in_the_summary(document, progress_of, evaluation):
    result = JobResult(document(), _done(progress_of, document), (), (evaluation(document(), 0, math.nan),))
    assert summary([result])["jobs"]["team-a/reverse"]["evalBefore"] is None


def test_a_failed_job_says_why(document, progress_of):
    failed = _done(progress_of, document, phase=Phase.FAILED, reason="TooManyFaults", message="KeyError: 'x'")
    entry = summary([JobResult(document(), failed)])["jobs"]["team-a/reverse"]
    assert (entry["phase"], entry["reason"], entry["message"]) == ("Failed", "TooManyFaults", "KeyError: 'x'")


def test_a_job_that_the_runner_gave_up_is_failed_with_the_roles_words(document, progress_of):
    result = JobResult(
        document(), progress_of(document()), failure=Failure("RoleFailed", "rollout-0 (tiny) exited: no memory")
    )
    entry = summary([result])["jobs"]["team-a/reverse"]
    assert (entry["phase"], entry["reason"]) == ("Failed", "RoleFailed")
    assert not all_succeeded([result])


def test_a_job_that_never_began_is_queued_and_no_success(document):
    result = JobResult(document())
    assert summary([result])["jobs"]["team-a/reverse"]["phase"] == "Queued"
    assert not all_succeeded([result])


def test_replies_are_paired_by_task_and_only_five(document, progress_of, evaluation):
    before = evaluation(document(), 0, 0.1, tuple(f"before {i}" for i in range(7)))
    after = evaluation(document(), 3, 0.9, tuple(f"after {i}" for i in range(6)))
    pairs = exchanges(JobResult(document(), _done(progress_of, document), (), (before, after)))
    assert [(pair.before.reply, pair.after.reply) for pair in pairs] == [
        (f"before {i}", f"after {i}") for i in range(5)
    ]


def test_without_a_second_evaluation_there_is_nothing_to_pair(document, progress_of, evaluation):
    result = JobResult(document(), progress_of(document()), (), (evaluation(document(), 0, 0.1, ("x",)),))
    assert exchanges(result) == ()
    assert summary([result])["jobs"]["team-a/reverse"]["evalAfter"] is None
