"""The mirror of the bus: what is on it, what changed, whether it answers; and the only writer of documents."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusUnavailable, Entry
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import JobDocument, Phase, Progress
from marlaas_api.wire import decode_as, encode
from marlaas_operator import bus_view
from marlaas_operator.bus_view import BusView, Stale
from marlaas_operator.plan import WriteDocument

SPEC = job_spec(
    RLJobSpec.model_validate(
        {
            "poolRef": {"name": "tiny"},
            "environment": {"name": "arithmetic"},
            "training": {"steps": 4, "groupsPerStep": 2},
        }
    )
)
KEY = "team-a.job"


def document(uid: str = "u1", generation: int = 1) -> JobDocument:
    return JobDocument(
        namespace="team-a", job="job", uid=uid, generation=generation, pool="tiny", tenant="team-a", spec=SPEC
    )


def level(step: int = 0) -> Progress:
    return Progress(
        namespace="team-a",
        job="job",
        uid="u1",
        phase=Phase.RUNNING,
        admitted=True,
        reason="Training",
        step=step,
        steps=4,
    )


class BusViewHarness:
    """A view over a server that a test may take away."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.changed: asyncio.Queue[str] = asyncio.Queue()
        self.states: asyncio.Queue[bool] = asyncio.Queue()
        self.view = BusView(self._open, self.changed.put_nowait, self._state)

    async def other(self) -> Bus:
        bus = self.server.connect("other")
        await bus.ensure()
        return bus

    async def _open(self) -> Bus:
        return self.server.connect("operator")

    def _state(self) -> None:
        self.states.put_nowait(self.view.state.available and self.view.state.synced)


@asynccontextmanager
async def running() -> AsyncIterator[tuple[BusViewHarness, Bus]]:
    harness = BusViewHarness()
    other = await harness.other()
    task = asyncio.create_task(harness.view.run())
    try:
        async with asyncio.timeout(10):
            await harness.view.usable.wait()
        yield harness, other
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(queue: "asyncio.Queue[bool]", value: bool) -> None:
    async with asyncio.timeout(20):
        while await queue.get() != value:
            pass


async def test_what_others_write_is_mirrored_and_told() -> None:
    async with running() as (harness, other):
        progress = await other.bucket(subjects.PROGRESS)
        await progress.put(KEY, encode(level(1)))
        assert await harness.changed.get() == KEY
        assert harness.view.progress(KEY) == level(1)
        await progress.delete(KEY)
        assert await harness.changed.get() == KEY
        assert harness.view.progress(KEY) is None


async def test_a_document_is_written_where_the_plan_saw_none_and_replaced_where_it_saw_that_one() -> None:
    async with running() as (harness, other):
        await harness.view.write(WriteDocument(document(), None))
        await harness.view.write(WriteDocument(document(generation=2), document()))
        entry = await (await other.bucket(subjects.JOBS)).get(KEY)
        assert entry is not None
        assert entry.data is not None
        assert decode_as(JobDocument, entry.data).generation == 2


async def test_a_plan_from_an_older_document_is_stale() -> None:
    async with running() as (harness, _):
        await harness.view.write(WriteDocument(document(), None))
        with pytest.raises(Stale):
            await harness.view.write(WriteDocument(document(generation=3), None))


async def test_somebody_elses_write_is_noticed_by_the_compare_and_set() -> None:
    async with running() as (harness, other):
        jobs = await other.bucket(subjects.JOBS)
        await jobs.put(KEY, encode(document("other")))
        with pytest.raises(Stale):
            await harness.view.write(WriteDocument(document(), None))
        assert harness.view.document(KEY) == document("other")
        await harness.view.write(WriteDocument(document(), document("other")))


async def test_a_bus_that_is_away_is_said_to_be_and_refuses_at_once_and_its_mirror_stays() -> None:
    async with running() as (harness, other):
        await harness.view.write(WriteDocument(document(), None))
        harness.server.available = False
        await until(harness.states, False)
        with pytest.raises(BusUnavailable):
            await harness.view.write(WriteDocument(document(generation=2), document()))
        assert harness.view.document(KEY) == document()
        harness.server.available = True
        await until(harness.states, True)
        await (await other.bucket(subjects.PROGRESS)).put(KEY, encode(level(2)))
        async with asyncio.timeout(10):
            while harness.view.progress(KEY) != level(2):
                await harness.changed.get()


async def test_a_store_that_takes_no_document_is_no_bus_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_view, "HEARTBEAT_S", 0.02)
    async with running() as (harness, other):
        await (await other.bucket(subjects.REPLICAS)).put(bus_view.LEADER, b"somebody")
        async with asyncio.timeout(10):
            while harness.view.state.leaderless_since is not None:
                await harness.states.get()
        monkeypatch.setattr(harness.view._buckets[subjects.JOBS], "create", full)
        told = harness.states.qsize()
        for _ in range(3):
            with pytest.raises(BusUnavailable):
                await harness.view.write(WriteDocument(document(), None))
        assert harness.view.state.available
        assert harness.states.qsize() == told


async def full(key: str, data: bytes) -> int:
    raise BusUnavailable("maximum bytes exceeded")


async def test_what_is_no_message_of_ours_is_as_if_it_were_not_there_and_is_overwritten() -> None:
    async with running() as (harness, other):
        await (await other.bucket(subjects.JOBS)).put(KEY, b"rubbish")
        assert await harness.changed.get() == KEY
        assert harness.view.document(KEY) is None
        await harness.view.write(WriteDocument(document(), None))
        assert harness.view.document(KEY) == document()


async def test_a_bus_that_lost_everything_is_seen_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_view, "REREAD_S", 0.05)
    async with running() as (harness, other):
        for generation in range(1, 4):
            before = None if generation == 1 else document(generation=generation - 1)
            await harness.view.write(WriteDocument(document(generation=generation), before))
        harness.server.streams.clear()
        await other.ensure()
        async with asyncio.timeout(10):
            while harness.view.document(KEY) is not None:
                await harness.changed.get()
        await harness.view.write(WriteDocument(document(), None))
        assert harness.view.document(KEY) == document()


async def test_a_replica_that_answers_a_moment_late_takes_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as (harness, other):
        await (await other.bucket(subjects.PROGRESS)).put(KEY, encode(level(1)))
        await harness.changed.get()
        late = await harness.view._buckets[subjects.PROGRESS].entries()
        await (await other.bucket(subjects.PROGRESS)).put(KEY, encode(level(2)))
        await harness.changed.get()

        async def stale() -> list[Entry]:
            return late.copy()

        with monkeypatch.context() as patched:
            patched.setattr(harness.view._buckets[subjects.PROGRESS], "entries", stale)
            assert not await harness.view._read_whole(subjects.PROGRESS), "it is to be read again soon"
        assert harness.view.progress(KEY) == level(2)
        assert await harness.view._read_whole(subjects.PROGRESS)
        assert harness.view.progress(KEY) == level(2)
        monkeypatch.setattr(harness.view._buckets[subjects.PROGRESS], "entries", stale)
        for _ in range(2):
            await harness.view._read_whole(subjects.PROGRESS)
        assert harness.view.progress(KEY) == level(1), "what it says twice is so: the bus was emptied"


async def test_whether_an_orchestrator_leads_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_view, "HEARTBEAT_S", 0.05)
    async with running() as (harness, other):
        replicas = await other.bucket(subjects.REPLICAS)
        async with asyncio.timeout(10):
            while harness.view.state.leaderless_since is None:
                await harness.states.get()
            await replicas.put(bus_view.LEADER, b"somebody")
            while harness.view.state.leaderless_since is not None:
                await harness.states.get()
        assert harness.view.state.available
