"""Cached documents and progress, the health of the bus, and the only writer of documents."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.operator.objects import job

from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import JobDocument
from marlaas_api.wire import decode_as, encode
from marlaas_operator.bus_health import BusHealth
from marlaas_operator.job_documents import JobDocuments, Stale
from marlaas_operator.plan import WriteDocument
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy
monotonic = virtual_time.monotonic
pytestmark = pytest.mark.usefixtures("monotonic")

SPEC = job_spec(RLJobSpec.model_validate(job("team-a", "job", "tiny")["spec"]))
KEY = "team-a.job"


def document(uid: str = "u1", generation: int = 1) -> JobDocument:
    return JobDocument(
        namespace="team-a", job="job", uid=uid, generation=generation, pool="tiny", tenant="team-a", spec=SPEC
    )


class DocumentsHarness:
    """Documents on a server."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.changed: asyncio.Queue[str] = asyncio.Queue()
        self.health = BusHealth(lambda: None, virtual_time.now)
        self.documents = JobDocuments(self._open, self.health, self.changed.put_nowait, lambda tenant: None)

    async def other(self) -> Bus:
        bus = self.server.connect("other")
        await bus.ensure()
        return bus

    async def _open(self) -> Bus:
        return self.server.connect("operator")


@asynccontextmanager
async def running() -> AsyncIterator[tuple[DocumentsHarness, Bus]]:
    harness = DocumentsHarness()
    other = await harness.other()
    task = asyncio.create_task(harness.documents.run())
    try:
        async with asyncio.timeout(10):
            await harness.health.usable.wait()
        yield harness, other
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_document_is_written_where_the_plan_saw_none_and_replaced_where_it_saw_that_one() -> None:
    async with running() as (harness, other):
        await harness.documents.write(WriteDocument(document(), None))
        await harness.documents.write(WriteDocument(document(generation=2), document()))
        entry = await (await other.bucket(subjects.JOBS)).get(KEY)
        assert entry is not None
        assert entry.data is not None
        assert decode_as(JobDocument, entry.data).generation == 2
        with pytest.raises(Stale):
            await harness.documents.write(WriteDocument(document(generation=3), document()))


async def test_somebody_elses_write_is_noticed_by_the_compare_and_set() -> None:
    async with running() as (harness, other):
        jobs = await other.bucket(subjects.JOBS)
        await jobs.put(KEY, encode(document("other")))
        with pytest.raises(Stale):
            await harness.documents.write(WriteDocument(document(), None))
        assert harness.documents.document(KEY) == document("other")
        await harness.documents.write(WriteDocument(document(), document("other")))


async def test_what_is_no_message_of_ours_is_as_if_it_were_not_there_and_is_overwritten() -> None:
    async with running() as (harness, other):
        await (await other.bucket(subjects.JOBS)).put(KEY, b"rubbish")
        assert await harness.changed.get() == KEY
        assert harness.documents.document(KEY) is None
        await harness.documents.write(WriteDocument(document(), None))
        assert harness.documents.document(KEY) == document()
