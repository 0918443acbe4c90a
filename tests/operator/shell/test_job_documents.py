"""Cached documents, and their only writer, by compare-and-set."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.operator.policies.scenes import document

from marlaas_api import subjects
from marlaas_api.background import background
from marlaas_api.bus import Bus, Entry
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.errors import Unreadable
from marlaas_api.messages import JobDocument
from marlaas_api.wire import decode_as, encode
from marlaas_operator.bus_health import BusHealth
from marlaas_operator.job_documents import JobDocuments, Stale
from marlaas_operator.plan import WriteDocument
from tests import virtual_time

KEY = "team-a.sums"
FIRST, SECOND = document(), document(generation=2)


@pytest.fixture
async def changed() -> asyncio.Queue[str]:
    return asyncio.Queue()


@pytest.fixture
async def other() -> Bus:
    bus = MemoryServer().connect("other")
    await bus.ensure()
    return bus


@pytest.fixture
async def documents(other: Bus, changed: asyncio.Queue[str]) -> AsyncIterator[JobDocuments]:
    async def dial() -> Bus:
        return other

    health = BusHealth(lambda: None, virtual_time.now)
    documents = JobDocuments(dial, health, changed.put_nowait, lambda tenant: None)
    async with background(documents.run()):
        async with asyncio.timeout(10):
            await health.usable.wait()
        yield documents


async def stored(bus: Bus) -> JobDocument:
    entry = await (await bus.bucket(subjects.JOBS)).get(KEY)
    assert isinstance(entry, Entry)
    return decode_as(JobDocument, entry.data or b"")


async def test_a_document_is_written_where_the_plan_saw_none_and_replaced_where_it_saw_that_one(documents, other):
    await documents.write(WriteDocument(FIRST, None))
    await documents.write(WriteDocument(SECOND, FIRST))
    assert await stored(other) == SECOND
    with pytest.raises(Stale):
        await documents.write(WriteDocument(document(generation=3), FIRST))
    assert await stored(other) == SECOND


async def test_somebody_elses_write_is_noticed_and_rubbish_is_neither_absent_nor_overwritten(documents, other, changed):
    jobs, theirs = await other.bucket(subjects.JOBS), document(uid="other")
    await jobs.put(KEY, encode(theirs))
    with pytest.raises(Stale):
        await documents.write(WriteDocument(FIRST, None))
    assert documents.document(KEY) == theirs
    await jobs.put(KEY, b"rubbish")
    while not documents.unreadable(KEY):
        await changed.get()
    assert documents.document(KEY) == theirs
    with pytest.raises(Unreadable, match=f"JobDocument of key {KEY} cannot be read"):
        await documents.write(WriteDocument(FIRST, theirs))
