"""Who claims what, settles it, and hears of it again."""

import asyncio

import pytest
from tests.api.bus_contract.asking import Connect, contents, soon

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusRefused, Consumer, Delivery, Stored

EPISODES, TASKS = subjects.EPISODES, subjects.TASKS


async def claimed(bus: Bus, ns: str, stream: str = TASKS, **options: float) -> tuple[str, Consumer, Delivery]:
    """A subject with one message, a consumer of it, and the message's first delivery."""
    subject = subjects.task(ns, "job") if stream == TASKS else subjects.episode(ns, "job")
    await bus.publish(subject, b"1")
    consumer = await bus.consumer(stream, subjects.consumer(ns, "job"), subject, **options)
    (delivery,) = await soon(consumer.fetch(1, 5))
    return subject, consumer, delivery


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


async def test_an_acked_task_is_gone_for_good(bus: Bus, ns: str) -> None:
    subject, consumer, delivery = await claimed(bus, ns, ack_wait_s=0.2)
    await delivery.ack()
    await delivery.ack()
    assert await bus.replay(TASKS, subject) == []
    assert await soon(consumer.fetch(1, 0.5)) == []


async def test_an_acked_episode_stays_in_its_log(bus: Bus, ns: str) -> None:
    subject, consumer, delivery = await claimed(bus, ns, EPISODES)
    await delivery.ack()
    assert len(await bus.replay(EPISODES, subject)) == 1
    assert await soon(consumer.fetch(1, 0.05)) == []


async def test_what_is_not_acked_in_time_is_delivered_again(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    sequence = await bus.publish(subject, b"1")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject, ack_wait_s=0.2)
    (first,) = await soon(consumer.fetch(1, 5))
    (second,) = await soon(consumer.fetch(1, 5))
    assert first.stored == second.stored == Stored(subject, sequence, b"1")
    assert (first.num_delivered, second.num_delivered) == (1, 2)
    await first.ack()
    assert await bus.replay(TASKS, subject) == []


async def test_progress_starts_the_ack_wait_anew(bus: Bus, ns: str) -> None:
    subject = subjects.task(ns, "job")
    for data in (b"slow", b"dead"):
        await bus.publish(subject, data)
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject, ack_wait_s=2.0)
    slow, _ = await soon(consumer.fetch(2, 5))
    assert await soon(consumer.fetch(1, 1.0)) == []
    await slow.in_progress()
    assert contents(await soon(consumer.fetch(1, 5))) == [b"dead"]
    assert contents(await soon(consumer.fetch(1, 5))) == [b"slow"]


async def test_a_nak_brings_it_back_at_once_or_after_a_delay(bus: Bus, ns: str) -> None:
    _, consumer, first = await claimed(bus, ns)
    await first.nak()
    (second,) = await soon(consumer.fetch(1, 5))
    await second.nak(2.0)
    assert await soon(consumer.fetch(1, 0.05)) == []
    (third,) = await soon(consumer.fetch(1, 5))
    assert third.num_delivered == 3


async def test_poison_is_never_delivered_again(bus: Bus, ns: str) -> None:
    _, consumer, delivery = await claimed(bus, ns, ack_wait_s=0.2)
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
