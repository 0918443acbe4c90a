"""What every bus promises, asked of JetStream through the gateway and of the fake."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import pytest

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusRefused, BusUnavailable, Conflict, Delivery, Entry, Request
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_nats import connect
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.subjects import BucketSpec, StreamSpec

T = TypeVar("T")
Connect = Callable[[str], Awaitable[Bus]]

FULL = StreamSpec("FULL", ("full.*",), work_queue=True, max_bytes=4096)
FORGETFUL = StreamSpec("FORGETFUL", ("forgetful.*",), max_bytes=4096)
BRIEF = BucketSpec("brief", ttl_s=1.0)
EPISODES, TASKS = subjects.EPISODES, subjects.TASKS


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"))
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture(params=["nats", "memory"])
async def dial(request: pytest.FixtureRequest, nats_url: str) -> AsyncIterator[Connect]:
    """Opens clients of one server."""
    opened: list[Bus] = []
    memory = MemoryServer()

    async def open_one(name: str) -> Bus:
        bus: Bus = memory.connect(name) if request.param == "memory" else await connect(nats_url, name=name)
        opened.append(bus)
        return bus

    first = await open_one("first")
    await first.ensure((*subjects.STREAMS, FULL, FORGETFUL), (*subjects.BUCKETS, BRIEF))  # type: ignore[call-arg]
    yield open_one
    for bus in opened:
        await bus.close()


@pytest.fixture
async def bus(dial: Connect) -> Bus:
    return await dial("bus")


@pytest.fixture
def ns() -> str:
    """A namespace that no other test uses."""
    return f"ns-{uuid.uuid4().hex[:12]}"


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 10)


async def take(entries: AsyncIterator[Entry], number: int) -> list[tuple[str, bytes | None]]:
    found = [await soon(anext(entries)) for _ in range(number)]
    return [(entry.key, entry.data) for entry in found]


def contents(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.stored.data for delivery in deliveries]


# Streams


async def test_what_is_published_is_stored_in_order(bus: Bus, ns: str) -> None:
    subject = subjects.episode(ns, "job")
    sequences = [await bus.publish(subject, data) for data in (b"1", b"2", b"3")]
    assert sequences == sorted(sequences)
    found = await bus.replay(EPISODES, subject)
    assert [(stored.subject, stored.sequence, stored.data) for stored in found] == [
        (subject, sequence, data) for sequence, data in zip(sequences, (b"1", b"2", b"3"), strict=True)
    ]


async def test_an_empty_and_a_large_message_come_back_whole(bus: Bus, ns: str) -> None:
    subject = subjects.episode(ns, "job")
    large = bytes(bus.max_payload_bytes)
    await bus.publish(subject, b"")
    await bus.publish(subject, large, message_id="an-id-that-is-as-long-as-ids-are" * 4)
    assert [stored.data for stored in await bus.replay(EPISODES, subject)] == [b"", large]


async def test_a_message_beyond_the_limit_is_refused_and_the_bus_goes_on(bus: Bus, ns: str) -> None:
    subject = subjects.episode(ns, "job")
    with pytest.raises(BusRefused, match=subject):
        await bus.publish(subject, bytes(bus.max_payload_bytes + 1))
    assert await bus.publish(subject, b"1") > 0


async def test_a_subject_without_a_stream_is_refused(bus: Bus) -> None:
    with pytest.raises(BusRefused, match=r'"nobody\.stores\.this"'):
        await bus.publish("nobody.stores.this", b"1")


@pytest.mark.parametrize("subject", ["a b", "a..b", "", "task.*.x"])
async def test_what_is_not_a_subject_is_refused(bus: Bus, subject: str) -> None:
    with pytest.raises(BusRefused):
        await bus.publish(subject, b"1")


async def test_the_same_message_id_is_stored_once(bus: Bus, ns: str) -> None:
    subject = subjects.episode(ns, "job")
    first = await bus.publish(subject, b"1", message_id=f"{ns}-1")
    other = await bus.publish(subject, b"2", message_id=f"{ns}-2")
    assert await bus.publish(subject, b"again", message_id=f"{ns}-1") == first
    assert [stored.sequence for stored in await bus.replay(EPISODES, subject)] == [first, other]


async def test_the_first_writer_of_a_subject_wins(bus: Bus, ns: str) -> None:
    subject = subjects.turn(ns, "job", "episode", 0)
    sequence = await bus.publish(subject, b"mine", expect_last=0)
    with pytest.raises(Conflict, match=subject):
        await bus.publish(subject, b"yours", expect_last=0)
    assert await bus.publish(subject, b"next", expect_last=sequence) > sequence
    last = await bus.last(subjects.TURNS, subject)
    assert last is not None
    assert last.data == b"next"


async def test_repeating_a_compare_and_set_under_its_id_is_no_conflict(bus: Bus, ns: str) -> None:
    subject = subjects.turn(ns, "job", "episode", 0)
    sequence = await bus.publish(subject, b"mine", expect_last=0, message_id=f"{ns}-mine")
    assert await bus.publish(subject, b"mine", expect_last=0, message_id=f"{ns}-mine") == sequence
    with pytest.raises(Conflict):
        await bus.publish(subject, b"yours", expect_last=0, message_id=f"{ns}-yours")


async def test_of_many_racing_writers_exactly_one_wins(dial: Connect, ns: str) -> None:
    buses = [await dial(f"racer-{number}") for number in range(4)]
    subject = subjects.group(ns, "job", "agent")
    results = await asyncio.gather(
        *(bus.publish(subject, b"x", expect_last=0) for bus in buses for _ in range(5)), return_exceptions=True
    )
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 19


async def test_last_is_the_newest_of_exactly_this_subject(bus: Bus, ns: str) -> None:
    await bus.publish(subjects.turn(ns, "job", "a", 1), b"1")
    await bus.publish(subjects.turn(ns, "job", "a", 1), b"2")
    await bus.publish(subjects.turn(ns, "job", "a", 2), b"3")
    last = await bus.last(subjects.TURNS, subjects.turn(ns, "job", "a", 1))
    assert last is not None
    assert (last.subject, last.data) == (subjects.turn(ns, "job", "a", 1), b"2")
    assert await bus.last(subjects.TURNS, subjects.turn(ns, "job", "a", 3)) is None


async def test_a_missing_stream_is_refused_by_name(bus: Bus) -> None:
    with pytest.raises(BusRefused, match="NOWHERE"):
        await bus.last("NOWHERE", "a.b")
    with pytest.raises(BusRefused, match="NOWHERE"):
        await bus.replay("NOWHERE", "a.b")
    with pytest.raises(BusRefused, match="NOWHERE"):
        await bus.consumer("NOWHERE", "name", "a.b")
    with pytest.raises(BusRefused, match="nowhere"):
        await bus.bucket("nowhere")


async def test_replay_takes_wildcards_and_a_start(bus: Bus, ns: str) -> None:
    for episode in ("a", "b"):
        for number in range(3):
            await bus.publish(subjects.turn(ns, "job", episode, number), f"{episode}{number}".encode())
    found = await bus.replay(subjects.TURNS, subjects.turn(ns, "job", "*", "*"))
    assert [stored.data for stored in found] == [b"a0", b"a1", b"a2", b"b0", b"b1", b"b2"]
    one = await bus.replay(subjects.TURNS, subjects.turn(ns, "job", "a", "*"))
    assert [stored.data for stored in one] == [b"a0", b"a1", b"a2"]
    rest = await bus.replay(subjects.TURNS, subjects.turn(ns, "job", "*", "*"), start=found[2].sequence)
    assert rest == found[2:]
    assert await bus.replay(subjects.TURNS, subjects.turn(ns, "job", "c", "*")) == []


async def test_replay_of_thousands_is_complete_and_ends_although_more_is_written(bus: Bus, ns: str) -> None:
    subject = subjects.episode(ns, "job")
    for start in range(0, 2500, 250):
        await asyncio.gather(*(bus.publish(subject, b"%d" % number) for number in range(start, start + 250)))

    async def write_on() -> None:
        while True:
            await bus.publish(subject, b"more")

    writer = asyncio.create_task(write_on())
    found = await soon(bus.replay(EPISODES, subject))
    writer.cancel()
    assert {stored.data for stored in found} - {b"more"} == {b"%d" % number for number in range(2500)}
    assert [stored.sequence for stored in found] == sorted(stored.sequence for stored in found)


async def test_purge_forgets_a_subject_or_the_part_below_a_sequence(bus: Bus, ns: str) -> None:
    subject, other = subjects.episode(ns, "job"), subjects.episode(ns, "other")
    sequences = [await bus.publish(subject, b"x") for _ in range(4)]
    await bus.publish(other, b"stays")
    await bus.purge(EPISODES, subject, up_to=sequences[2])
    assert [stored.sequence for stored in await bus.replay(EPISODES, subject)] == sequences[2:]
    await bus.purge(EPISODES, subject, up_to=1)
    assert len(await bus.replay(EPISODES, subject)) == 2
    await bus.purge(EPISODES, subject)
    assert await bus.replay(EPISODES, subject) == []
    assert [stored.data for stored in await bus.replay(EPISODES, other)] == [b"stays"]


async def test_purge_takes_wildcards(bus: Bus, ns: str) -> None:
    for number in range(3):
        await bus.publish(subjects.turn(ns, "job", "episode", number), b"x")
    await bus.purge(subjects.TURNS, subjects.turn(ns, "job", "*", "*"))
    assert await bus.replay(subjects.TURNS, subjects.turn(ns, "job", "*", "*")) == []


async def test_a_full_work_queue_refuses_for_the_moment(bus: Bus) -> None:
    await bus.purge("FULL", "full.*")
    results = await asyncio.gather(*(bus.publish("full.x", bytes(1000)) for _ in range(5)), return_exceptions=True)
    assert isinstance(results[0], int)
    assert isinstance(results[-1], BusUnavailable)
    assert "maximum bytes exceeded" in str(results[-1])


async def test_a_full_log_forgets_its_oldest(bus: Bus) -> None:
    sequences = [await bus.publish("forgetful.x", bytes(1000)) for _ in range(8)]
    kept = [stored.sequence for stored in await bus.replay("FORGETFUL", "forgetful.x")]
    assert kept == sequences[-len(kept) :]
    assert 0 < len(kept) < 5


async def test_ensure_can_be_repeated_and_updates_what_differs(bus: Bus, ns: str) -> None:
    subject = subjects.episode(ns, "job")
    await bus.publish(subject, b"1")
    await bus.ensure()
    grown = StreamSpec("FORGETFUL", ("forgetful.*", "forgetful.*.*"), max_bytes=4096)
    await bus.ensure((grown,), ())  # type: ignore[call-arg]
    assert await bus.publish("forgetful.x.y", b"1") > 0
    assert len(await bus.replay(EPISODES, subject)) == 1


async def test_a_stream_does_not_silently_become_a_work_queue(bus: Bus) -> None:
    with pytest.raises(BusRefused, match="FORGETFUL"):
        await bus.ensure((StreamSpec("FORGETFUL", ("forgetful.*",), work_queue=True),), ())  # type: ignore[call-arg]


# Consumers


async def test_a_fetch_claims_in_order_and_is_empty_when_there_is_nothing(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    for data in (b"1", b"2", b"3"):
        await bus.publish(subject, data)
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject)
    assert contents(await soon(consumer.fetch(2, 5))) == [b"1", b"2"]
    assert contents(await soon(consumer.fetch(10, 5))) == [b"3"]
    assert await soon(consumer.fetch(10, 0.05)) == []
    assert await soon(consumer.fetch(10, 0)) == []


async def test_a_waiting_fetch_hears_of_a_message_at_once(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject)
    waiting = asyncio.create_task(consumer.fetch(10, 60))
    await asyncio.sleep(0)
    await bus.publish(subject, b"1")
    assert contents(await soon(waiting)) == [b"1"]


async def test_a_delivery_knows_what_it_is(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    sequence = await bus.publish(subject, b"1")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject)
    (delivery,) = await soon(consumer.fetch(1, 5))
    assert (delivery.stored.subject, delivery.stored.sequence, delivery.stored.data) == (subject, sequence, b"1")
    assert delivery.num_delivered == 1


async def test_an_acked_task_is_gone_for_good(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    await bus.publish(subject, b"1")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject, ack_wait_s=0.2)
    (delivery,) = await soon(consumer.fetch(1, 5))
    await delivery.ack()
    assert await bus.replay(TASKS, subject) == []
    assert await soon(consumer.fetch(1, 0.5)) == []


async def test_an_acked_episode_stays_in_its_log(bus: Bus, ns: str) -> None:
    subject = subjects.episode(ns, "job")
    await bus.publish(subject, b"1")
    consumer = await bus.consumer(EPISODES, subjects.consumer(ns, "job"), subject)
    (delivery,) = await soon(consumer.fetch(1, 5))
    await delivery.ack()
    assert len(await bus.replay(EPISODES, subject)) == 1
    assert await soon(consumer.fetch(1, 0.05)) == []


async def test_what_is_not_acked_in_time_is_delivered_again(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    await bus.publish(subject, b"1")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject, ack_wait_s=0.2)
    (first,) = await soon(consumer.fetch(1, 5))
    (second,) = await soon(consumer.fetch(1, 5))
    assert (first.stored, second.num_delivered) == (second.stored, 2)
    await first.ack()
    assert await bus.replay(TASKS, subject) == []


async def test_an_ack_can_be_repeated(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    await bus.publish(subject, b"1")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject)
    (delivery,) = await soon(consumer.fetch(1, 5))
    await delivery.ack()
    await delivery.ack()


async def test_progress_starts_the_ack_wait_anew(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    for data in (b"slow", b"dead"):
        await bus.publish(subject, data)
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject, ack_wait_s=1.0)
    slow, _ = await soon(consumer.fetch(2, 5))
    assert await soon(consumer.fetch(1, 0.1)) == []
    await slow.in_progress()
    assert contents(await soon(consumer.fetch(1, 5))) == [b"dead"]
    assert contents(await soon(consumer.fetch(1, 5))) == [b"slow"]


async def test_a_nak_brings_it_back_at_once_or_after_a_delay(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    await bus.publish(subject, b"1")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject)
    (first,) = await soon(consumer.fetch(1, 5))
    await first.nak()
    (second,) = await soon(consumer.fetch(1, 5))
    await second.nak(0.6)
    assert await soon(consumer.fetch(1, 0.05)) == []
    (third,) = await soon(consumer.fetch(1, 5))
    assert third.num_delivered == 3


async def test_poison_is_never_delivered_again(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    await bus.publish(subject, b"1")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject, ack_wait_s=0.2)
    (delivery,) = await soon(consumer.fetch(1, 5))
    await delivery.term()
    assert await soon(consumer.fetch(1, 0.5)) == []


async def test_a_consumer_is_taken_up_where_it_was(dial: Connect, ns: str) -> None:
    subject, name = subjects.episode(ns, "job"), subjects.consumer(ns, "job")
    one, other = await dial("one"), await dial("other")
    for data in (b"1", b"2"):
        await one.publish(subject, data)
    (first,) = await soon((await one.consumer(EPISODES, name, subject)).fetch(1, 5))
    await first.ack()
    assert contents(await soon((await other.consumer(EPISODES, name, subject)).fetch(10, 5))) == [b"2"]


async def test_members_of_one_consumer_share_and_two_consumers_do_not(dial: Connect, ns: str) -> None:
    subject = subjects.episode(ns, "job")
    one, other = await dial("one"), await dial("other")
    for number in range(10):
        await one.publish(subject, b"%d" % number)
    mine = await one.consumer(EPISODES, subjects.consumer(ns, "job", "shared"), subject)
    yours = await other.consumer(EPISODES, subjects.consumer(ns, "job", "shared"), subject)
    shared = contents(await soon(mine.fetch(5, 5))) + contents(await soon(yours.fetch(10, 5)))
    assert sorted(shared) == [b"%d" % number for number in range(10)]
    alone = await other.consumer(EPISODES, subjects.consumer(ns, "job", "alone"), subject)
    assert len(await soon(alone.fetch(20, 5))) == 10


async def test_no_more_than_max_pending_are_out_at_once(bus: Bus, ns: str) -> None:
    subject = subjects.episode(ns, "job")
    for number in range(5):
        await bus.publish(subject, b"%d" % number)
    consumer = await bus.consumer(EPISODES, subjects.consumer(ns, "job"), subject, max_pending=3)
    held = await soon(consumer.fetch(5, 60))
    assert len(held) == 3
    assert await soon(consumer.fetch(5, 0.05)) == []
    await held[0].ack()
    assert contents(await soon(consumer.fetch(5, 60))) == [b"3"]


async def test_two_fetches_at_once_share_without_losing_any(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject)
    waiting = [asyncio.create_task(consumer.fetch(3, 1)) for _ in range(2)]
    await asyncio.gather(*(bus.publish(subject, b"%d" % number) for number in range(6)))
    found = [data for task in waiting for data in contents(await soon(task))]
    while more := await soon(consumer.fetch(10, 0.2)):
        found += contents(more)
    assert sorted(found) == [b"%d" % number for number in range(6)]


async def test_a_cancelled_fetch_keeps_nothing_to_itself(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject, ack_wait_s=60)
    cancelled = asyncio.create_task(consumer.fetch(10, 60))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await bus.publish(subject, b"1")
    assert contents(await soon(consumer.fetch(10, 5))) == [b"1"]


async def test_a_deleted_consumer_is_refused_and_begins_anew_when_created(bus: Bus, ns: str) -> None:
    subject, name = subjects.episode(ns, "job"), subjects.consumer(ns, "job")
    await bus.publish(subject, b"1")
    consumer = await bus.consumer(EPISODES, name, subject)
    (delivery,) = await soon(consumer.fetch(1, 5))
    await bus.delete_consumer(EPISODES, name)
    await bus.delete_consumer(EPISODES, name)
    with pytest.raises(BusRefused, match=name):
        await soon(consumer.fetch(1, 5))
    with pytest.raises(BusRefused, match=name):
        await delivery.ack()
    again = await bus.consumer(EPISODES, name, subject)
    assert contents(await soon(again.fetch(1, 5))) == [b"1"]


async def test_a_waiting_fetch_ends_when_its_consumer_is_deleted(bus: Bus, ns: str) -> None:
    name = subjects.consumer(ns, "job")
    consumer = await bus.consumer(EPISODES, name, subjects.episode(ns, "job"))
    waiting = asyncio.create_task(consumer.fetch(1, 60))
    assert await soon(consumer.fetch(1, 0.05)) == []
    await bus.delete_consumer(EPISODES, name)
    with pytest.raises(BusRefused, match=name):
        await soon(waiting)


async def test_two_consumers_cannot_claim_the_same_tasks(bus: Bus, ns: str) -> None:
    await bus.consumer(TASKS, subjects.consumer(ns, "job"), subjects.task(ns, "job"))
    with pytest.raises(BusRefused, match=subjects.consumer(ns, "other")):
        await bus.consumer(TASKS, subjects.consumer(ns, "other"), subjects.task(ns, "*"))
    await bus.consumer(TASKS, subjects.consumer(ns, "another"), subjects.task(ns, "another"))


async def test_claims_of_a_consumer_that_is_not_there_yet_wait_for_it(dial: Connect, bus: Bus, ns: str) -> None:
    subject, name = subjects.task(ns, "job"), subjects.consumer(ns, "job", "sandbox")
    claims = await (await dial("sandbox")).claims(TASKS, name, ack_wait_s=30)
    assert await soon(claims.fetch(1, 0.05)) == []
    waiting = asyncio.create_task(claims.fetch(1, 10))
    await bus.consumer(TASKS, name, subject)
    await bus.publish(subject, b"1")
    (delivery,) = await soon(waiting)
    assert delivery.stored.data == b"1"
    await delivery.ack()
    assert await bus.replay(TASKS, subject) == []
    await bus.delete_consumer(TASKS, name)
    assert await soon(claims.fetch(1, 0.05)) == []


async def test_a_bucket_that_is_not_inspected_is_missed_at_its_first_use(bus: Bus, ns: str) -> None:
    jobs = await bus.bucket(subjects.JOBS, inspected=False)
    assert await jobs.get(subjects.job_key(ns, "job")) is None
    nowhere = await bus.bucket("nowhere", inspected=False)
    with pytest.raises(BusRefused, match="nowhere"):
        await nowhere.get("key")


# Buckets


async def test_a_key_is_written_read_and_overwritten(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.PROGRESS)
    key = subjects.job_key(ns, "job")
    assert await bucket.get(key) is None
    first = await bucket.put(key, b"1")
    assert await bucket.get(key) == Entry(key, b"1", first)
    second = await bucket.put(key, b"")
    assert second > first
    assert await bucket.get(key) == Entry(key, b"", second)


async def test_only_one_creates_a_key(dial: Connect, ns: str) -> None:
    key = subjects.pin_key(ns, "job", "agent", "uid-t1")
    pins = [await (await dial(name)).bucket(subjects.PINS) for name in ("one", "other")]
    results = await asyncio.gather(*(pin.create(key, b"x") for pin in pins for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 9


async def test_an_update_needs_the_revision_it_saw(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.POLICY)
    key = subjects.policy_key(ns, "job", "agent")
    first = await bucket.create(key, b"1")
    second = await bucket.update(key, b"2", first)
    with pytest.raises(Conflict):
        await bucket.update(key, b"3", first)
    assert await bucket.get(key) == Entry(key, b"2", second)


async def test_a_key_is_deleted_only_at_the_revision_that_was_named(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    key = subjects.job_key(ns, "job")
    first = await bucket.create(key, b"1")
    second = await bucket.put(key, b"2")
    with pytest.raises(Conflict):
        await bucket.delete(key, first)
    assert await bucket.get(key) == Entry(key, b"2", second)
    await bucket.delete(key, second)
    assert await bucket.get(key) is None


async def test_a_deleted_key_is_absent_and_can_be_created_again(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    key = subjects.job_key(ns, "job")
    first = await bucket.create(key, b"1")
    await bucket.delete(key)
    await bucket.delete(subjects.job_key(ns, "never-was"))
    assert await bucket.get(key) is None
    assert await bucket.entries(f"{ns}.") == []
    with pytest.raises(Conflict):
        await bucket.update(key, b"2", first)
    second = await bucket.create(key, b"2")
    assert await bucket.get(key) == Entry(key, b"2", second)


async def test_entries_are_the_newest_of_each_key_below_a_prefix(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.POLICY)
    for number in range(12):
        await bucket.put(f"{ns}.job.agent", b"%d" % number)
    await bucket.put(f"{ns}.job.other", b"x")
    await bucket.put(f"{ns}.job-2.agent", b"y")
    found = {entry.key: entry.data for entry in await bucket.entries(f"{ns}.job.")}
    assert found == {f"{ns}.job.agent": b"11", f"{ns}.job.other": b"x"}
    assert len(await bucket.entries(f"{ns}.")) == 3
    assert {f"{ns}.job-2.agent", f"{ns}.job.agent"} <= {entry.key for entry in await bucket.entries()}


@pytest.mark.parametrize("key", ["", ".a", "a.", "a..b", "a b", "a.*", "a.>", "é"])
async def test_what_is_not_a_key_is_refused(bus: Bus, key: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    with pytest.raises(BusRefused, match="not a key"):
        await bucket.put(key, b"1")
    with pytest.raises(BusRefused, match="not a key"):
        await bucket.get(key)


@pytest.mark.parametrize("prefix", ["team", ".", "a..", "*."])
async def test_a_prefix_is_made_of_whole_tokens(bus: Bus, prefix: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    with pytest.raises(BusRefused, match="not a prefix"):
        await bucket.entries(prefix)


async def test_a_key_that_is_not_renewed_vanishes_and_watchers_hear_of_it(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(BRIEF.name)
    async with bucket.watch(f"{ns}.") as entries:
        await bucket.put(f"{ns}.a", b"1")
        assert await take(entries, 2) == [(f"{ns}.a", b"1"), (f"{ns}.a", None)]
        assert await bucket.get(f"{ns}.a") is None
        assert await bucket.entries(f"{ns}.") == []
        await bucket.create(f"{ns}.a", b"2")
        assert await take(entries, 1) == [(f"{ns}.a", b"2")]


async def test_a_watch_tells_what_is_there_and_then_what_changes(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    await bucket.put(f"{ns}.gone", b"x")
    await bucket.delete(f"{ns}.gone")
    await bucket.put(f"{ns}.a", b"old")
    revision = await bucket.put(f"{ns}.a", b"1")
    async with bucket.watch(f"{ns}.") as entries:
        assert await soon(anext(entries)) == Entry(f"{ns}.a", b"1", revision)
        await bucket.put(f"{ns}.b", b"2")
        await bucket.put(f"elsewhere-{ns}.b", b"3")
        await bucket.delete(f"{ns}.a")
        assert await take(entries, 2) == [(f"{ns}.b", b"2"), (f"{ns}.a", None)]


async def test_a_cancelled_wait_of_a_watch_loses_nothing(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.JOBS)
    async with bucket.watch(f"{ns}.") as entries:
        for number in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(entries), 0.01)
            await bucket.put(f"{ns}.a", b"%d" % number)
            assert await take(entries, 1) == [(f"{ns}.a", b"%d" % number)]


async def test_a_watch_of_everything_sees_every_key(bus: Bus, ns: str) -> None:
    bucket = await bus.bucket(subjects.LEDGER)
    async with bucket.watch() as entries:
        await bucket.put(f"{ns}.a", b"1")
        while (await soon(anext(entries))).key != f"{ns}.a":
            pass


# Core messages


async def test_a_listener_hears_in_order_what_is_sent_from_its_first_moment(dial: Connect, ns: str) -> None:
    here, there = await dial("here"), await dial("there")
    heard: asyncio.Queue[Request] = asyncio.Queue()
    async with here.listen(f"gen.{ns}.job.*", heard.put):
        for number in range(100):
            await there.send(f"gen.{ns}.job.agent", b"%d" % number, "reply.to")
        found = [await soon(heard.get()) for _ in range(100)]
    assert found[0] == Request(f"gen.{ns}.job.agent", "reply.to", b"0")
    assert [request.data for request in found] == [b"%d" % number for number in range(100)]


async def test_members_of_a_queue_share_and_others_hear_all(dial: Connect, ns: str) -> None:
    heard: dict[str, list[bytes]] = {"one": [], "other": [], "all": []}
    done = asyncio.Event()

    def collect(name: str) -> Callable[[Request], Awaitable[None]]:
        async def handler(request: Request) -> None:
            heard[name].append(request.data)
            if len(heard["one"]) + len(heard["other"]) == 40 and len(heard["all"]) == 40:
                done.set()

        return handler

    one, other, sender = await dial("one"), await dial("other"), await dial("sender")
    subject = f"gen.{ns}.job.agent"
    async with (
        one.listen(subject, collect("one"), queue="rollout"),
        other.listen(subject, collect("other"), queue="rollout"),
        other.listen(subject, collect("all")),
    ):
        for number in range(40):
            await sender.send(subject, b"%d" % number)
        await soon(done.wait())
    assert sorted(heard["one"] + heard["other"]) == sorted(heard["all"])
    assert heard["one"]
    assert heard["other"]


async def test_answers_come_back_to_an_inbox(dial: Connect, ns: str) -> None:
    asker, answerer = await dial("asker"), await dial("answerer")
    answers: asyncio.Queue[Request] = asyncio.Queue()
    inbox = asker.new_inbox()
    assert inbox != asker.new_inbox()

    async def answer(request: Request) -> None:
        await answerer.send(request.reply, request.data.upper())

    async with asker.listen(inbox, answers.put), answerer.listen(f"gen.{ns}.job.agent", answer):
        await asker.send(f"gen.{ns}.job.agent", b"hello", inbox)
        assert (await soon(answers.get())).data == b"HELLO"


async def test_after_the_context_nobody_listens(bus: Bus, ns: str) -> None:
    heard: asyncio.Queue[Request] = asyncio.Queue()
    async with bus.listen(f"gen.{ns}.a", heard.put):
        pass
    async with bus.listen(f"gen.{ns}.*", heard.put):
        await bus.send(f"gen.{ns}.a", b"1")
        await soon(heard.get())
    assert heard.empty()


async def test_a_handler_that_fails_ends_the_context_with_its_error(bus: Bus, ns: str) -> None:
    async def broken(request: Request) -> None:
        raise LookupError(request.data.decode())

    async def block() -> None:
        async with bus.listen(f"gen.{ns}.a", broken):
            await bus.send(f"gen.{ns}.a", b"boom")
            await asyncio.Event().wait()

    with pytest.raises(LookupError, match="boom"):
        await soon(block())


async def test_an_error_of_the_block_comes_out_as_itself(bus: Bus, ns: str) -> None:
    heard: asyncio.Queue[Request] = asyncio.Queue()
    with pytest.raises(LookupError, match="mine"):
        async with bus.listen(f"gen.{ns}.a", heard.put):
            raise LookupError("mine")


async def test_a_listener_of_a_stored_subject_hears_it_too(bus: Bus, ns: str) -> None:
    heard: asyncio.Queue[Request] = asyncio.Queue()
    async with bus.listen(f"event.{ns}.*.*", heard.put):
        await bus.publish(subjects.event(ns, "job", "trainer"), b"1")
        assert (await soon(heard.get())).data == b"1"


async def test_a_closed_bus_refuses_everything(bus: Bus, ns: str) -> None:
    await bus.close()
    await bus.close()
    with pytest.raises(BusRefused, match="closed"):
        await bus.publish(subjects.episode(ns, "job"), b"1")
    with pytest.raises(BusRefused, match="closed"):
        await bus.send("a.b", b"1")
    with pytest.raises(BusRefused, match="closed"):
        await bus.last(EPISODES, subjects.episode(ns, "job"))
