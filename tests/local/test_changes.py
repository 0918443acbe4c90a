"""Jobs are added, edited, suspended, resumed and cancelled while a run goes on, and their documents on NATS say so."""

import asyncio
import re

import pytest
from tests.harness import a_progress, job_document
from tests.harness import changed as edited
from tests.tables import rows

from marlaas.local import announcements, changes
from marlaas.local.announcements import announce, withdraw, write_change
from marlaas.local.changes import ChangeAnswer, RunChange, ask, changed, take
from marlaas.local.folder import OutFolder, hold
from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory.buckets import MemoryBucket
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, Phase
from marlaas_api.wire import decode_as, encode

FIRST, SECOND = job_document("first"), job_document("second", tenant="b")


def apply(change, *jobs: JobDocument, **more: object):
    return changed(jobs or (FIRST,), change, **{"progress": {}, "pools": ["tiny"], **more})  # type: ignore[arg-type]


def test_a_new_job_has_the_runs_seed_and_one_that_is_submitted_again_keeps_its_uid():
    found = apply(RunChange(jobs=(SECOND,)), seed=7)
    assert [job.ref.name for job in found.jobs] == ["first", "second"]
    assert found.written == (SECOND.model_copy(update={"seed": 7}),)
    assert found.lines == ("team-a/second: added",)
    again = job_document("first", uid="another")
    assert apply(RunChange(jobs=(again,))).lines == ("team-a/first: unchanged",)
    found = apply(RunChange(jobs=(edited(again, priority=3),)))
    assert [(job.uid, job.generation, job.spec.priority) for job in found.written] == [("uid-first", 2, 3)]


def test_suspending_and_resuming_make_new_generations():
    key = FIRST.ref.key
    suspended = apply(RunChange(suspend={key: True}))
    assert [(job.spec.suspend, job.generation) for job in suspended.written] == [(True, 2)]
    assert apply(RunChange(suspend={key: True}), *suspended.jobs).written == ()
    resumed = apply(RunChange(suspend={key: False}), *suspended.jobs)
    assert [(job.spec.suspend, job.generation) for job in resumed.written] == [(False, 3)]
    assert resumed.lines == ("team-a/first: resumed",)


@pytest.mark.parametrize("reason", ["Training", "Preempted", "WaitingForSlots"])
def test_a_job_that_is_cancelled_while_it_runs_or_waits_leaves_the_run(reason):
    waits = {} if reason == "Training" else {"phase": Phase.QUEUED, "admitted": False}
    known = {FIRST.ref.key: a_progress(FIRST, reason=reason, step=2, **waits)}
    found = apply(RunChange(cancel=(FIRST.ref.key,)), FIRST, SECOND, progress=known)
    assert (found.jobs, found.written, found.cancelled) == ((SECOND,), (), (FIRST,))
    assert found.lines == ("team-a/first: cancelled; its files stay in the output folder",)


@pytest.mark.parametrize(("added", "change", "text"), rows(__file__, "unchangeable"))
def test_what_cannot_be_changed_is_refused_with_a_reason(added, change, text):
    change = RunChange(jobs=tuple(job_document(name, pool=pool) for name, pool in added), **change)
    with pytest.raises(InvalidInput, match=re.escape(text)):
        apply(change, progress={FIRST.ref.key: a_progress(FIRST, phase=Phase.FAILED)})


def test_a_change_is_taken_once_and_one_of_another_version_is_refused(tmp_path):
    known = a_progress(FIRST, step=2)
    with pytest.raises(InvalidInput, match="no `marlaas run` uses"):
        ask(OutFolder(tmp_path), RunChange())
    with hold(tmp_path) as folder:
        with pytest.raises(InvalidInput, match="nothing was changed"):
            ask(folder, RunChange(), timeout_s=0.0)  # the runner is busy
        assert take(folder, tuple) == []
        (folder.changes / "1.json").write_text(RunChange(cancel=("a.b",)).model_dump_json())
        (folder.changes / "2.json").write_text('{"more": 1}')
        (folder.changes / "3.json").write_text(RunChange(asks_progress=True).model_dump_json())
        (question,) = take(folder, lambda: (known,))
        assert question.change.cancel == ("a.b",)
        assert take(folder, tuple) == []
        question.answer(ChangeAnswer(lines=("done",)))
        answers = [(folder.changes / f"{number}.answer").read_bytes() for number in (1, 2, 3)]
        assert ChangeAnswer.model_validate_json(answers[0]).lines == ("done",)
        assert b"another version" in answers[1]
        assert ChangeAnswer.model_validate_json(answers[2]).progress == (known,), "a question changes nothing"
        changes.forget(folder)
        assert not any(folder.changes.iterdir())
    with pytest.raises(InvalidInput, match="no `marlaas run` uses"):
        ask(folder, RunChange())


async def test_announcing_twice_changes_nothing_and_a_taken_name_refuses_the_whole_change(bus, document):
    bucket = await bus.bucket(subjects.JOBS)
    for _ in range(2):
        await announce(bus, [document()])
    first = await bucket.get("team-a.reverse")
    await announce(bus, [document(generation=2)])
    second = await bucket.get("team-a.reverse")
    assert (first.revision, second.revision) == (1, 2)
    await announce(bus, [document("taken", uid="theirs")])
    with pytest.raises(InvalidInput, match="already has a job team-a/taken of another run"):
        await write_change(bus, [document("free"), document("taken")], [], asyncio.Event())
    assert await bucket.get("team-a.free") is None


async def test_a_cancelled_jobs_name_is_free_and_its_document_says_that_it_is_deleted(bus, document):
    bucket = await bus.bucket(subjects.JOBS)
    await announce(bus, [document()])
    assert await withdraw(bus, [document(uid="earlier")]) == ()
    assert not decode_as(JobDocument, (await bucket.get("team-a.reverse")).data).deleted, "a later job has the name"
    for _ in range(2):
        assert await withdraw(bus, [document()]) == (document(),), "the orchestrator has not deleted it"
    marked = decode_as(JobDocument, (await bucket.get("team-a.reverse")).data)
    assert (marked.deleted, marked.generation) == (True, 2)
    assert await withdraw(bus, [document("never")]) == ()
    assert await bucket.get("team-a.never") is None
    await announce(bus, [document(uid="next")])
    assert decode_as(JobDocument, (await bucket.get("team-a.reverse")).data).uid == "next"


@pytest.mark.parametrize("change", [announce, withdraw])
async def test_a_document_that_another_writer_changes_meanwhile_is_read_again(bus, document, monkeypatch, change):
    """As `_forget_document` of the orchestrator does with a cancelled job of the same name."""
    job, bucket = document(), await bus.bucket(subjects.JOBS)
    first = document(uid="cancelled", deleted=True) if change is announce else job
    await bucket.put(job.ref.key, encode(first))
    get = MemoryBucket.get_from_leader

    async def get_before_a_change(self, key):
        monkeypatch.setattr(MemoryBucket, "get_from_leader", get)
        entry = await get(self, key)
        await (bucket.delete(key) if change is announce else bucket.put(key, entry.data))
        return entry

    monkeypatch.setattr(MemoryBucket, "get_from_leader", get_before_a_change)
    await change(bus, [job])
    there = decode_as(JobDocument, (await bucket.get(job.ref.key)).data)
    assert (there.uid, there.deleted) == (job.uid, change is withdraw)


async def test_a_change_is_written_as_soon_as_the_server_answers(bus, document, monkeypatch):
    monkeypatch.setattr(announcements, "RETRY_S", 0.01)
    added, cancelled, create, refused = document("added"), document("cancelled"), MemoryBucket.create, []
    await announce(bus, [cancelled])

    async def refuse_twice(self, key, data, **named):
        if len(refused) < 2:
            refused.append(key)
            raise BusUnavailable("not now")
        return await create(self, key, data)

    monkeypatch.setattr(MemoryBucket, "create", refuse_twice)
    assert await write_change(bus, [added], [cancelled], asyncio.Event()) == (cancelled,)
    bucket = await bus.bucket(subjects.JOBS)
    found = [decode_as(JobDocument, (await bucket.get(f"team-a.{name}")).data) for name in ("added", "cancelled")]
    assert [one.deleted for one in found] == [False, True]


async def test_a_change_that_a_run_is_stopped_before_is_left_to_the_next_run(bus, document, monkeypatch):
    """The record of the run has the change. The next run in the folder announces and withdraws what the record names."""
    stopping = asyncio.Event()

    async def refuse(self, key, data, **named):
        stopping.set()
        raise BusUnavailable("not now")

    monkeypatch.setattr(MemoryBucket, "create", refuse)
    assert await write_change(bus, [document()], [document("cancelled")], stopping) == (document("cancelled"),)
