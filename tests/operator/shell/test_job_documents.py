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
from marlaas_api.messages import JobDocument, PastUses, TenantUsage, UsageAmounts
from marlaas_api.wire import decode_as, encode
from marlaas_operator.bus_health import BusHealth
from marlaas_operator.job_documents import JobDocuments, Stale
from marlaas_operator.plan import WriteDocument
from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy
monotonic = virtual_time.monotonic
pytestmark = pytest.mark.usefixtures("monotonic")

KEY = "team-a.sums"
FIRST, SECOND = document(), document(generation=2)


@pytest.fixture
async def changed() -> asyncio.Queue[str]:
    """Keys that have changed."""
    return asyncio.Queue()


@pytest.fixture
async def other() -> Bus:
    """Somebody else's connection."""
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


async def test_somebody_elses_write_is_noticed_by_the_compare_and_set() -> None:
    async with running() as (harness, other):
        jobs = await other.bucket(subjects.JOBS)
        await jobs.put(KEY, encode(document("other")))
        with pytest.raises(Stale):
            await harness.documents.write(WriteDocument(document(), None))
        assert harness.documents.document(KEY) == document("other")
        await harness.documents.write(WriteDocument(document(), document("other")))


async def test_a_bus_that_is_away_is_said_to_be_and_refuses_at_once_and_its_mirror_stays() -> None:
    async with running() as (harness, other):
        await harness.documents.write(WriteDocument(document(), None))
        harness.server.available = False
        await until(harness.states, False)
        with pytest.raises(BusUnavailable):
            await harness.documents.write(WriteDocument(document(generation=2), document()))
        assert harness.documents.document(KEY) == document()
        harness.server.available = True
        await until(harness.states, True)
        await (await other.bucket(subjects.PROGRESS)).put(KEY, encode(level(2)))
        async with asyncio.timeout(10):
            while harness.documents.progress(KEY) != level(2):
                await harness.changed.get()


async def test_the_usage_of_tenants_is_followed_and_other_keys_of_its_bucket_are_not() -> None:
    async with running() as (harness, other):
        bucket = await other.bucket(subjects.TENANTS)
        await bucket.put(subjects.PAST_USE, encode(PastUses(use={"acme": 1.0})))
        used = TenantUsage(tenant="acme", total=UsageAmounts(generated_tokens=7, trained_tokens=7))
        await bucket.put(subjects.tenant_usage_key("acme"), encode(used))
        async with asyncio.timeout(10):
            assert await harness.tenants.get() == "acme"
        assert harness.documents.usage("acme") == used
        assert harness.documents.usage("past-use") is None


async def test_a_store_that_takes_no_document_is_no_bus_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as (harness, other):
        assert harness.health.state.leaderless_since is not None
        await (await other.bucket(subjects.REPLICAS)).put(bus_health.LEADER, b"somebody")
        async with asyncio.timeout(10):
            while harness.health.state.leaderless_since is not None:
                await harness.states.get()
        monkeypatch.setattr(await harness.documents._jobs_bucket(), "create", full)
        told = harness.states.qsize()
        for _ in range(3):
            with pytest.raises(BusUnavailable):
                await harness.documents.write(WriteDocument(document(), None))
        assert harness.health.state.available
        assert harness.states.qsize() == told


async def full(key: str, data: bytes) -> int:
    raise BusUnavailable("maximum bytes exceeded")


async def test_what_cannot_be_read_is_not_absent_and_is_not_overwritten() -> None:
    async with running() as (harness, other):
        await (await other.bucket(subjects.JOBS)).put(KEY, b"rubbish")
        assert await harness.changed.get() == KEY
        assert harness.documents.document(KEY) is None
        with pytest.raises(Unreadable, match=f"JobDocument of key {KEY} cannot be read"):
            await harness.documents.write(WriteDocument(document(), None))
