"""Documents of a run's jobs on NATS: announced, withdrawn, and changed while the run goes on."""

import asyncio

import pytest

from marlaas.local import announcements
from marlaas.local.announcements import announce, withdraw, write_change
from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory.buckets import MemoryBucket
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument
from marlaas_api.wire import decode_as, encode


async def test_announcing_twice_changes_nothing_and_a_newer_document_replaces_the_older(bus, document):
    bucket = await bus.bucket(subjects.JOBS)
    for _ in range(2):
        await announce(bus, [document()])
    first = await bucket.get("team-a.reverse")
    await announce(bus, [document(generation=2)])
    second = await bucket.get("team-a.reverse")
    assert (first.revision, second.revision) == (1, 2)


async def test_a_name_that_another_run_holds_is_refused(bus, document):
    await announce(bus, [document(uid="theirs")])
    with pytest.raises(InvalidInput, match="already has a job team-a/reverse of another run"):
        await announce(bus, [document()])


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
    get = MemoryBucket.get

    async def get_before_a_change(self, key):
        monkeypatch.setattr(MemoryBucket, "get", get)
        entry = await get(self, key)
        await (bucket.delete(key) if change is announce else bucket.put(key, entry.data))
        return entry

    monkeypatch.setattr(MemoryBucket, "get", get_before_a_change)
    await change(bus, [job])
    there = decode_as(JobDocument, (await bucket.get(job.ref.key)).data)
    assert (there.uid, there.deleted) == (job.uid, change is withdraw)


async def test_a_change_of_which_one_name_is_taken_writes_nothing(bus, document):
    bucket = await bus.bucket(subjects.JOBS)
    await announce(bus, [document("taken", uid="theirs")])
    with pytest.raises(InvalidInput, match="already has a job team-a/taken of another run"):
        await write_change(bus, [document("free"), document("taken")], [], asyncio.Event())
    assert await bucket.get("team-a.free") is None


async def test_a_change_is_written_as_soon_as_the_server_answers(bus, document, monkeypatch):
    monkeypatch.setattr(announcements, "RETRY_S", 0.01)
    added, cancelled, create, refused = document("added"), document("cancelled"), MemoryBucket.create, []
    await announce(bus, [cancelled])

    async def refuse_twice(self, key, data):
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

    async def refuse(self, key, data):
        stopping.set()
        raise BusUnavailable("not now")

    monkeypatch.setattr(MemoryBucket, "create", refuse)
    assert await write_change(bus, [document()], [document("cancelled")], stopping) == (document("cancelled"),)
