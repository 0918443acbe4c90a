"""The output folder of a run, and the records of steps and evaluations in it."""

import errno
import fcntl
import json
import math
import os
import time

import pytest
from tests.harness import a_step, pool_document

from marlaas.local.changes import is_running
from marlaas.local.folder import OutFolder, RunRecord, hold, translated, write
from marlaas.local.records import RecordFile, open_job, open_jobs
from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory import MemoryBus
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import BusMessage, EvalRecord, StepRecord
from marlaas_api.wire import encode


async def _publish(bus, *records: BusMessage):
    for record in records:
        if isinstance(record, StepRecord):
            subject = subjects.step(record.namespace, record.job, record.uid, record.step)
        elif isinstance(record, EvalRecord):
            subject = subjects.evaluation(record.namespace, record.job, record.uid, record.version)
        await bus.publish(subject, encode(record))


def _lines(folder, document, name):
    return [json.loads(line) for line in (folder.job(document.ref) / name).read_text().splitlines()]


async def test_every_record_is_in_its_file_once_and_in_order(bus, tmp_path, document, evaluation):
    records = RecordFile(document().ref)
    await _publish(bus, a_step(document(), 0), evaluation(document(), 0, 0.1), a_step(document(), 1))
    assert await records.read(bus)
    await _publish(bus, a_step(document(), 2), evaluation(document(), 2, 0.5))
    assert await records.read(bus)
    assert not await records.read(bus)
    later = RecordFile(document().ref)
    await later.read(bus)
    for one in (records, later):  # a runner that comes later writes the same files from the stream
        with hold(tmp_path) as folder:
            one.write(folder)
            assert [line["step"] for line in _lines(folder, document(), "steps.jsonl")] == [0, 1, 2]
            assert [line["version"] for line in _lines(folder, document(), "evals.jsonl")] == [0, 2]


async def test_a_step_that_is_stored_while_records_are_read_is_not_lost(bus, document, evaluation):
    """The steps are read, then a step and an evaluation are stored, and then the evaluations are read."""
    records, job = RecordFile(document().ref), document()
    await _publish(bus, a_step(job, 0))

    class LateBus:
        async def replay(self, stream, subject, first=1):
            found = await bus.replay(stream, subject, first)
            if subject.startswith("step.") and 1 not in records.steps and not records.evals:
                await _publish(bus, a_step(job, 1), evaluation(job, 2, 0.5))
            return found

    late = LateBus()
    assert await records.read(late)
    assert (sorted(records.steps), sorted(records.evals)) == ([0], [2])
    assert await records.read(late)
    assert sorted(records.steps) == [0, 1]
    assert not await records.read(late)


async def test_new_steps_are_new_also_after_a_read_that_failed_half_way(bus, document, monkeypatch):
    records, replay = RecordFile(document().ref), MemoryBus.replay
    await _publish(bus, a_step(document(), 0))

    async def fail(self, stream, subject, first=1):
        if subject.startswith("eval."):
            raise BusUnavailable("not now")
        return await replay(self, stream, subject, first)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryBus, "replay", fail)
        with pytest.raises(BusUnavailable):
            await records.read(bus)
    assert await records.read(bus)
    assert sorted(records.steps) == [0]


async def test_records_of_an_earlier_job_of_the_same_name_are_not_ours(bus, document, evaluation):
    earlier = document(uid="earlier")
    await _publish(
        bus, a_step(earlier, 0), evaluation(earlier, 0, 0.5), a_step(document("other"), 0), a_step(document(), 1)
    )
    records = RecordFile(document().ref)
    await records.read(bus)
    assert records.in_order() == ((a_step(document(), 1),), ())


@pytest.fixture
def out(tmp_path, document, evaluation):
    first, second = document("reverse"), document("spell", namespace="team-b", uid="u2")
    with hold(tmp_path / "out") as folder:
        folder.write_record(RunRecord(jobs=(first, second), pools=(pool_document("/m"),)))
        file = RecordFile(first.ref)
        for record in (a_step(first, 0), a_step(first, 1), evaluation(first, 0, math.nan)):
            file.add(record)
        file.write(folder)
    return tmp_path / "out"


def test_a_run_is_opened_whole_by_job_or_from_a_jobs_own_folder_and_its_records_are_read(out):
    assert [one.name for one in open_jobs(out)] == ["team-a/reverse", "team-b/spell"]
    for name in ("spell", "team-b/spell", "team-b.spell"):
        assert open_job(out, name).name == "team-b/spell"
    assert open_job(out / "team-a" / "reverse").name == "team-a/reverse"
    job = open_job(out, "reverse")
    assert job.pools["tiny"].model_path == "/m"
    assert [record.step for record in job.steps()] == [0, 1]
    assert [(record.version, math.isnan(record.reward_mean)) for record in job.evals()] == [(0, True)]
    assert open_job(out, "spell").steps() == ()


def test_each_agent_of_a_run_has_the_base_model_of_its_pool(tmp_path, document):
    pools = tuple(pool_document(f"/{name}", name) for name in ("tiny", "big"))
    team = document(spec={"agents": [{"name": "a"}, {"name": "b", "poolRef": {"name": "big"}}]})
    for known in (pools, pools[:1]):
        with hold(tmp_path / "out") as folder:
            folder.write_record(RunRecord(jobs=(team,), pools=known))
        if known == pools:
            opened = open_job(tmp_path / "out")
            assert [opened.pool_of(agent).model_path for agent in team.spec.agents] == ["/tiny", "/big"]
    with pytest.raises(InvalidInput, match="its record lacks pool big"):
        open_job(tmp_path / "out")


def test_what_cannot_be_opened_is_told(out, tmp_path):
    with pytest.raises(InvalidInput, match="is not an output folder of `marlaas run`"):
        open_jobs(tmp_path)
    with pytest.raises(InvalidInput, match="has no job spel: its jobs are team-a/reverse, team-b/spell"):
        open_jobs(out, "spel")
    with pytest.raises(InvalidInput, match="choose one with --job team-a/reverse or --job team-b/spell"):
        open_job(out)
    (out / "team-a" / "reverse" / "steps.jsonl").write_text("nonsense\n")
    with pytest.raises(InvalidInput, match=r"steps.jsonl has a line"):
        open_job(out, "reverse").steps()


def test_a_file_of_records_is_replaced_only_if_it_changes(tmp_path, document):
    folder, job = OutFolder(tmp_path), document()
    file = RecordFile(job.ref)
    file.write(folder)
    steps, evals = (folder.job(job.ref) / name for name in ("steps.jsonl", "evals.jsonl"))
    before = evals.stat().st_ino
    file.add(a_step(job, 0))
    file.write(folder)
    assert len(steps.read_bytes().splitlines()) == 1
    assert evals.stat().st_ino == before
    steps.unlink()
    file.write(folder)
    assert len(steps.read_bytes().splitlines()) == 1


def test_a_command_that_asks_whether_a_run_uses_the_folder_does_not_keep_a_run_from_it(tmp_path, monkeypatch):
    with hold(tmp_path) as folder:
        pass
    with (folder.state / "lock").open("a") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: asking.close())
        with hold(tmp_path):
            assert asking.closed
            assert is_running(folder)


def test_a_full_disk_and_a_strange_record_are_told_and_an_error_inside_the_run_is_not_blamed_on_the_folder(tmp_path):
    sentence = "the disk is full: free space and run the same command again"
    with pytest.raises(InvalidInput, match=sentence), translated(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="of something else"), hold(tmp_path) as folder:  # noqa: PT012
        (folder.state / "run.json").write_text('{"jobs": 3}')
        with pytest.raises(InvalidInput, match="is not a record of this version of marlaas"):
            folder.read_record()
        raise OSError("of something else")


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    target = tmp_path / "summary.json"
    write(target, b"old")
    (tmp_path / ".summary.json.partial").mkdir()
    with pytest.raises(InvalidInput):
        write(target, b"new")
    assert target.read_bytes() == b"old"


def test_a_file_system_without_symbolic_links_serves_too(tmp_path, document, monkeypatch):
    def refused(*_: object):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refused)
    with hold(tmp_path) as folder:
        (folder.logs / "orchestrator.log").touch()
        folder.link_logs(document().ref)
