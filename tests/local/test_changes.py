"""Jobs are added, edited, suspended, resumed and cancelled while a run goes on."""

import re
from pathlib import Path

import pytest
from tests.harness import a_progress, job_document
from tests.harness import changed as edited

from marlaas.local import changes
from marlaas.local.changes import ChangeAnswer, RunChange, ask, changed, take
from marlaas.local.folder import OutFolder, hold
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, Phase

FIRST, SECOND = job_document("first"), job_document("second", tenant="b")


def apply(change: RunChange, *jobs: JobDocument, **more: object) -> changes.ChangedJobs:
    return changed(jobs or (FIRST,), change, **{"progress": {}, "pools": ["tiny"], **more})  # type: ignore[arg-type]


def test_a_new_job_is_added_with_the_runs_seed() -> None:
    found = apply(RunChange(jobs=(SECOND,)), seed=7)
    assert [job.ref.name for job in found.jobs] == ["first", "second"]
    assert found.written == (SECOND.model_copy(update={"seed": 7}),)
    assert found.lines == ("team-a/second: added",)


def test_a_job_that_is_submitted_again_keeps_its_uid_and_changes_only_where_it_may() -> None:
    again = job_document("first", uid="another")
    assert apply(RunChange(jobs=(again,))).lines == ("team-a/first: unchanged",)
    found = apply(RunChange(jobs=(edited(again, priority=3),)))
    assert [(job.uid, job.generation, job.spec.priority) for job in found.written] == [("uid-first", 2, 3)]
    with pytest.raises(InvalidInput, match=r"job team-a/first: the seed was 0 and is now 1"):
        apply(RunChange(jobs=(again.model_copy(update={"seed": 1}),)))


def test_suspending_and_resuming_make_new_generations() -> None:
    key = FIRST.ref.key
    suspended = apply(RunChange(suspend={key: True}))
    assert [(job.spec.suspend, job.generation) for job in suspended.written] == [(True, 2)]
    assert apply(RunChange(suspend={key: True}), *suspended.jobs).written == ()
    resumed = apply(RunChange(suspend={key: False}), *suspended.jobs)
    assert [(job.spec.suspend, job.generation) for job in resumed.written] == [(False, 3)]
    assert resumed.lines == ("team-a/first: resumed",)


@pytest.mark.parametrize("reason", ["Training", "Preempted", "WaitingForSlots"])
def test_a_job_that_is_cancelled_while_it_runs_or_waits_leaves_the_run(reason: str) -> None:
    waits = {} if reason == "Training" else {"phase": Phase.QUEUED, "admitted": False}
    known = {FIRST.ref.key: a_progress(FIRST, reason=reason, step=2, **waits)}
    found = apply(RunChange(cancel=(FIRST.ref.key,)), FIRST, SECOND, progress=known)
    assert (found.jobs, found.written, found.cancelled) == ((SECOND,), (), (FIRST,))
    assert found.lines == ("team-a/first: cancelled; its files stay in the output folder",)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (RunChange(suspend={"team-a.third": True}), "job team-a/third is not part of this run"),
        (RunChange(suspend={FIRST.ref.key: True}), "job team-a/first has failed: a finished job cannot be changed"),
        (RunChange(cancel=(FIRST.ref.key,)), "job team-a/first has failed"),
        (
            RunChange(jobs=(job_document("third", pool="big"),)),
            "job team-a/third: ModelPool big is not part of this run, whose pools are tiny",
        ),
    ],
    ids=["unknown", "suspend an ended one", "cancel an ended one", "another pool"],
)
def test_what_cannot_be_changed_is_refused_with_a_reason(change: RunChange, text: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(text)):
        apply(change, progress={FIRST.ref.key: a_progress(FIRST, phase=Phase.FAILED)})


def test_nobody_answers_for_a_folder_that_no_run_uses(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no `marlaas run` uses"):
        ask(OutFolder(tmp_path), RunChange())
    with hold(tmp_path) as folder:
        pass
    with pytest.raises(InvalidInput, match="no `marlaas run` uses"):
        ask(folder, RunChange())


def test_a_runner_that_is_busy_is_told_apart_from_one_that_has_taken_the_change(tmp_path: Path) -> None:
    with hold(tmp_path) as folder:
        with pytest.raises(InvalidInput, match="nothing was changed"):
            ask(folder, RunChange(), timeout_s=0.0)
        assert take(folder, tuple) == []


def test_a_change_is_taken_once_and_one_of_another_version_is_refused(tmp_path: Path) -> None:
    with hold(tmp_path) as folder:
        (folder.changes / "1.json").write_text(RunChange(cancel=("a.b",)).model_dump_json())
        (folder.changes / "2.json").write_text('{"more": 1}')
        (question,) = take(folder, tuple)
        assert question.change.cancel == ("a.b",)
        assert take(folder, tuple) == []
        question.answer(ChangeAnswer(lines=("done",)))
        assert ChangeAnswer.model_validate_json((folder.changes / "1.answer").read_bytes()).lines == ("done",)
        assert "another version" in (folder.changes / "2.answer").read_text()
        changes.forget(folder)
        assert not any(folder.changes.iterdir())


def test_a_question_for_the_progress_is_answered_and_changes_nothing(tmp_path: Path) -> None:
    known = a_progress(FIRST, step=2)
    with hold(tmp_path) as folder:
        (folder.changes / "1.json").write_text(RunChange(asks_progress=True).model_dump_json())
        assert take(folder, lambda: (known,)) == []
        assert ChangeAnswer.model_validate_json((folder.changes / "1.answer").read_bytes()).progress == (known,)
