"""What a job leaves in the streams, and what is purged when: one step late, and not before the recorder has read it, unless the stream is tight."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.harness import working
from tests.killing import kill_at
from tests.orchestrator.harness import final, mixed, running

from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable
from marlaas_api.bus_memory import MemoryBus, MemoryServer
from marlaas_api.messages import JobVerdict, Phase, Progress, ReplicaReport
from marlaas_api.names import JobRef
from marlaas_worker.orchestrator.jobs import Jobs
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.orchestrator.retention import Retention

REF = JobRef("team-a", "sums", "u1")
EPISODES, TURNS = subjects.episode("team-a", "sums"), subjects.turn("team-a", "sums", "*", "*")
TURN_BYTES = 1000
ENDED = {"phase": Phase.SUCCEEDED, "admitted": False, "reason": "Finished", "steps": 1}


class Streams:
    """A bus with the turns and episodes of a job, and what purges them."""

    def __init__(self) -> None:
        self.bus = MemoryServer().connect("test")
        self.retention = Retention(self.bus, REF, lambda: 0.0)
        self.reports: list[ReplicaReport] = []
        context = SimpleNamespace(bus=self.bus, now=lambda: 0.0)
        self.progress_store = ProgressStore(self.bus)
        self.jobs = Jobs(context, self.progress_store, lambda: self.reports, lambda: None)

    async def end(self) -> None:
        """The job has ended, as an orchestrator that begins now finds it."""
        await self.progress_store.put(Progress(namespace="team-a", job="sums", uid=REF.uid, **ENDED))
        await self.jobs.begin((await self.bus.state(subjects.TURNS)).last_sequence)

    async def record(self, number: int) -> int:
        return await self.bus.publish(subjects.turn("team-a", "sums", f"u1-t{number}-0-1", 0), b"x")

    async def step(self, number: int) -> None:
        """A group of two is played and on record; nothing else is open."""
        for _ in range(2):
            turn = await self.record(number * 10 + _)
            self.retention.add_episode(await self.bus.publish(EPISODES, b"x"), f"u1-t{number}")
        self.retention.mark_step(lambda group: False, turn + 1)
        await self.retention.purge(at_once=False)

    async def left(self) -> tuple[int, int]:
        turns = await self.bus.replay(subjects.TURNS, TURNS)
        return len(turns), len(await self.bus.replay(subjects.EPISODES, EPISODES))

    async def recorder(self) -> Callable[[int], Awaitable[None]]:
        """A recorder that has read nothing; a function that has it read episodes."""
        consumer = await self.bus.consumer(subjects.EPISODES, "team-a_sums_reader", EPISODES)

        async def read(number: int) -> None:
            for delivery in await consumer.fetch(number, 1.0):
                await delivery.ack()

        return read


@pytest.fixture
async def streams() -> Streams:
    made = Streams()
    await made.bus.ensure()
    return made


async def test_turns_and_episodes_stay_until_the_recorder_has_read_them_and_one_step_longer(streams):
    read = await streams.recorder()
    for number in range(3):
        await streams.step(number)
    assert await streams.left() == (6, 6)
    for episodes, left in ((2, 4), (4, 2)):
        await read(episodes)
        await streams.retention.purge(at_once=False)
        assert await streams.left() == (left, left)


@pytest.mark.parametrize("refused", [None, subjects.TURNS, subjects.EPISODES])
async def test_a_step_is_purged_at_once_when_the_stream_is_tight_and_if_that_fails_again(streams, monkeypatch, refused):
    for number in range(2):
        await streams.step(number)
    assert await streams.left() == (2, 2), "one step late"
    purge = MemoryBus.purge

    async def refuse(bus: MemoryBus, name: str, subject: str, up_to: int | None = None) -> None:
        if name == refused:
            raise BusUnavailable("not now")
        await purge(bus, name, subject, up_to)

    if refused is not None:
        with monkeypatch.context() as patched:
            patched.setattr(MemoryBus, "purge", refuse)
            with pytest.raises(BusUnavailable):
                await streams.retention.purge(at_once=True)
        assert await streams.left() != (0, 0)
    assert await streams.retention.purge(at_once=True)
    assert await streams.left() == (0, 0)


async def test_the_turns_of_an_ended_job_go_once_its_recorder_has_read_all_and_its_last_episodes_stay(streams):
    read = await streams.recorder()
    await streams.step(0)
    await streams.end()
    await streams.jobs.purge_once()
    assert await streams.left() == (2, 2)
    await read(2)
    await streams.record(9)  # of more steps: the job is resumed
    await streams.jobs.purge_once()
    assert await streams.left() == (1, 2)


async def test_a_turn_recorded_after_its_jobs_end_goes_when_a_replica_reports_it_unless_the_job_is_gone(
    streams, document
):
    await streams.end()
    job = document().model_copy(update={"uid": REF.uid})
    for number, (documents, left) in enumerate([({REF.uid: job}, 0), ({}, 1)], 1):
        await streams.jobs.update(documents)
        await streams.record(number)
        reported = {"job_turn_bytes": {REF.uid: number}}
        streams.reports = [ReplicaReport(role="rollout", pool="tiny", replica="rollout-0", **reported)]
        await streams.jobs.purge_late_turns()
        await streams.jobs.purge_once()
        assert await streams.left() == (left, 0)


async def test_a_neighbours_turns_never_push_out_those_of_a_job_that_waits_for_its_trainer(harness, document):
    harness.turn_bytes = TURN_BYTES
    slow, busy = document("slow", maxStaleness=1), document("busy", steps=40)
    harness.may_train.clear()
    async with running(harness, slow, mixed):
        await harness.progress(slow, lambda level: level.num_outstanding == 4 and level.eval_last is not None)
        turns = harness.server.streams[subjects.TURNS]
        turns.spec = replace(turns.spec, max_bytes=40 * TURN_BYTES)
        always = asyncio.Event()
        always.set()
        async with working(harness.play(busy, mixed), harness.train(busy, always)):
            await harness.submit(busy)
            level = await harness.progress(busy, final)
        assert (level.phase, level.step) == (Phase.SUCCEEDED, 40)
        harness.may_train.set()
        level = await harness.progress(slow, final)
    assert (level.phase, level.step) == (Phase.SUCCEEDED, 3)


async def test_a_failed_job_leaves_no_tasks_although_a_kill_follows_its_last_progress(harness, document):
    job = document(maxStaleness=1)
    harness.withheld = range(1000)
    passed = kill_at("orchestrator.end.after_progress")
    async with running(harness, job, mixed):
        await harness.progress(job, lambda level: level.num_outstanding == 4)
        assert await harness.bus.replay(subjects.TASKS, subjects.task("team-a", job.job))
        why = JobVerdict(reason="PoolRemoved", message="the pool tiny is gone")
        await harness.submit(job.model_copy(update={"verdict": why, "generation": 2}))
        level = await harness.progress(job, final)
        queued = harness.server.stream(subjects.TASKS).by_subject
        await harness.until(lambda: not queued.get(subjects.task("team-a", job.job)))
    assert (level.phase, passed.count("orchestrator.end.after_progress")) == (Phase.FAILED, 1)
