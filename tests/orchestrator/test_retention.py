"""What is purged when: one step late, and not before the recorder has read it, unless the recorder is dead or the stream is tight."""

import pytest

from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable, Position
from marlaas_api.bus_memory import MemoryBus, MemoryServer
from marlaas_api.messages import ReplicaReport
from marlaas_api.names import JobRef
from marlaas_worker.orchestrator.retention import PATIENCE_S, Leftovers, PurgeMark, PurgeMarks, Retention

REF = JobRef("team-a", "sums", "u1")
EPISODES, TURNS = subjects.episode("team-a", "sums"), subjects.turn("team-a", "sums", "*", "*")


def marks(*numbers: int) -> PurgeMarks:
    made = PurgeMarks()
    made.waiting = [PurgeMark(number, number, number) for number in numbers]
    return made


@pytest.mark.parametrize(
    ("recorder", "at_once", "expected", "left"),
    [
        (None, False, 20, 1),
        (None, True, 30, 0),
        (Position(9, 40), False, None, 3),
        (Position(10, 30), False, 10, 2),
        (Position(25, 5), True, 20, 1),
        (Position(7, 0), True, 30, 0),
    ],
    ids=["no recorder", "tight", "nothing read", "one step read", "tight, two steps read", "all read"],
)
def test_the_newest_mark_that_is_due_and_read_is_purged(recorder, at_once, expected, left):
    made = marks(10, 20, 30)
    mark = made.due(recorder, 0.0, at_once=at_once)
    if mark is not None:
        made.purged(mark)
    assert (mark and mark.turns, len(made.waiting)) == (expected, left)


def test_a_recorder_that_acks_nothing_for_ten_minutes_is_not_waited_for():
    made = marks(10, 20, 30)
    assert made.due(Position(5, 9), 100.0, at_once=True) is None
    assert made.due(Position(6, 8), 50.0 + PATIENCE_S, at_once=True) is None, "it acks, if slowly"
    assert made.due(Position(6, 8), 50.0 + 2 * PATIENCE_S, at_once=True) is None
    mark = made.due(Position(6, 8), 51.0 + 2 * PATIENCE_S, at_once=True)
    assert mark.turns == 30


class RetentionHarness:
    """A bus with the turns and episodes of a job, a recorder that has read nothing, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.bus = MemoryServer().connect("test")

    async def step(self, retention: Retention, number: int) -> None:
        """A group is played and on record; nothing else is open."""
        for member in (0, 1):
            await self.bus.publish(subjects.turn("team-a", "sums", f"u1-t{number}-{member}-1", 0), b"x")
            sequence = await self.bus.publish(EPISODES, b"x")
            retention.note(sequence, f"u1-t{number}")
        state = await self.bus.state(subjects.TURNS)
        retention.recorded((), state.last_sequence + 1)
        await retention.purge(at_once=False)

    async def left(self) -> tuple[int, int]:
        turns = await self.bus.replay(subjects.TURNS, TURNS)
        return len(turns), len(await self.bus.replay(subjects.EPISODES, EPISODES))


@pytest.fixture
async def harness() -> RetentionHarness:
    made = RetentionHarness()
    await made.bus.ensure()
    return made


async def test_turns_and_episodes_stay_until_the_recorder_has_read_them(harness):
    retention = Retention(harness.bus, REF, lambda: harness.now)
    recorder = await harness.bus.consumer(subjects.EPISODES, "team-a_sums_reader", EPISODES)
    for number in range(3):
        await harness.step(retention, number)
    assert await harness.left() == (6, 6)
    for delivery in await recorder.fetch(2, 1.0):
        await delivery.ack()
    await retention.purge(at_once=False)
    assert await harness.left() == (4, 4)
    for delivery in await recorder.fetch(4, 1.0):
        await delivery.ack()
    await retention.purge(at_once=False)
    assert await harness.left() == (2, 2), "one step late"


async def test_a_step_is_purged_when_the_next_one_is_on_record_and_at_once_when_the_stream_is_tight(harness):
    retention = Retention(harness.bus, REF, lambda: harness.now)
    await harness.step(retention, 0)
    assert await harness.left() == (2, 2)
    await harness.step(retention, 1)
    assert await harness.left() == (2, 2)
    await retention.purge(at_once=True)
    assert await harness.left() == (0, 0)


async def test_the_turns_of_an_ended_job_go_once_its_recorder_has_read_all_and_its_last_episodes_stay(harness):
    retention = Retention(harness.bus, REF, lambda: harness.now)
    recorder = await harness.bus.consumer(subjects.EPISODES, "team-a_sums_reader", EPISODES)
    await harness.step(retention, 0)
    leftovers = Leftovers(harness.bus, lambda: harness.now)
    leftovers.ended((await harness.bus.state(subjects.TURNS)).last_sequence, REF)
    await leftovers.look()
    assert await harness.left() == (2, 2)
    for delivery in await recorder.fetch(2, 1.0):
        await delivery.ack()
    await leftovers.look()
    assert await harness.left() == (0, 2)


async def test_what_a_resumed_job_records_is_not_of_its_earlier_end(harness):
    retention = Retention(harness.bus, REF, lambda: harness.now)
    await harness.step(retention, 0)
    leftovers = Leftovers(harness.bus, lambda: harness.now)
    leftovers.ended((await harness.bus.state(subjects.TURNS)).last_sequence, REF)
    await harness.bus.publish(subjects.turn("team-a", "sums", "u1-t9-0-1", 0), b"of more steps")
    await leftovers.look()
    assert await harness.left() == (1, 2)


async def test_a_turn_that_is_recorded_after_its_jobs_end_goes_when_a_replica_reports_it_unless_the_job_is_resumed(
    harness,
):
    leftovers = Leftovers(harness.bus, lambda: harness.now)
    leftovers.ended(0, REF)
    await leftovers.look()
    for number, (idle, left) in enumerate([({"u1"}, 0), (set(), 1)], 1):
        await harness.bus.publish(subjects.turn("team-a", "sums", f"u1-t{number}-0-1", 0), b"late")
        report = ReplicaReport(role="rollout", pool="tiny", replica="rollout-0", job_turn_bytes={"u1": number})
        await leftovers.note([report], idle)
        await leftovers.look()
        assert await harness.left() == (left, 0)


async def test_the_totals_of_a_replica_that_dies_count_as_changed(harness):
    leftovers = Leftovers(harness.bus, lambda: harness.now)
    leftovers.ended(0, REF)
    report = ReplicaReport(role="rollout", pool="tiny", replica="rollout-0", job_turn_bytes={"u1": 5})
    await leftovers.note([report], {"u1"})
    await leftovers.look()
    await harness.bus.publish(subjects.turn("team-a", "sums", "u1-t1-0-1", 0), b"recorded before it died, not reported")
    await leftovers.note([report], {"u1"})
    await leftovers.look()
    assert await harness.left() == (1, 0)
    await leftovers.note([], {"u1"})
    await leftovers.look()
    assert await harness.left() == (0, 0)


@pytest.mark.parametrize("stream", [subjects.TURNS, subjects.EPISODES])
async def test_a_purge_that_fails_is_repeated(harness, monkeypatch, stream):
    retention = Retention(harness.bus, REF, lambda: harness.now)
    for number in range(2):
        await harness.step(retention, number)
    purge = MemoryBus.purge

    async def refuse(bus: MemoryBus, name: str, subject: str, up_to: int | None = None) -> None:
        if name == stream:
            raise BusUnavailable("not now")
        await purge(bus, name, subject, up_to)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryBus, "purge", refuse)
        with pytest.raises(BusUnavailable):
            await retention.purge(at_once=True)
    assert await harness.left() != (0, 0)
    assert await retention.purge(at_once=True)
    assert await harness.left() == (0, 0)


async def test_turns_of_an_ended_job_that_come_during_a_purge_are_purged_too(harness, monkeypatch):
    leftovers, purge = Leftovers(harness.bus, lambda: harness.now), MemoryBus.purge
    first = await harness.bus.publish(subjects.turn("team-a", "sums", "u1-t0-0-1", 0), b"x")
    leftovers.ended(first, REF)

    async def purge_late(bus: MemoryBus, name: str, subject: str, up_to: int | None = None) -> None:
        await purge(bus, name, subject, up_to)
        if up_to == first + 1:
            leftovers.ended(await bus.publish(subjects.turn("team-a", "sums", "u1-t0-0-1", 1), b"x"), REF)

    monkeypatch.setattr(MemoryBus, "purge", purge_late)
    for _ in range(2):
        await leftovers.look()
    assert await harness.left() == (0, 0)
