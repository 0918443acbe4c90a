"""Who claims what, settles it, and hears of it again."""

import asyncio

import pytest
from tests.api.bus_contract.conftest import claim, contents, soon

from marlaas_api import subjects
from marlaas_api.bus import Bus, BusRefused, Consumer, Delivery, Stored

EPISODES, TASKS = subjects.EPISODES, subjects.TASKS
WAIT_S = 0.2
"""A short ack wait. Timers of a real server may come late, but never early."""


async def claimed(bus: Bus, ns: str, stream: str = TASKS, **options: float) -> tuple[str, Consumer, Delivery]:
    """A subject with one message, a consumer of it, and the message's first delivery."""
    subject = subjects.task(ns, "job") if stream == TASKS else subjects.episode(ns, "job")
    await bus.publish(subject, b"1")
    consumer = await bus.consumer(stream, subjects.consumer(ns, "job"), subject, **options)
    return subject, consumer, await claim(consumer)


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_fetch_claims_in_order_and_is_empty_when_there_is_nothing(bus, ns):
    subject = subjects.task(ns, "job")
    for data in (b"1", b"2", b"3"):
        await bus.publish(subject, data)
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject)
    assert contents(await soon(consumer.fetch(2, 5))) == [b"1", b"2"]
    assert contents(await soon(consumer.fetch(10, 5))) == [b"3"]
    assert await soon(consumer.fetch(10, 0.05)) == []
    assert await soon(consumer.fetch(10, 0)) == []


async def test_a_waiting_fetch_hears_of_a_message_at_once(bus, ns):
    subject = subjects.task(ns, "job")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject)
    waiting = asyncio.create_task(consumer.fetch(10, 3600))
    await asyncio.sleep(0)
    await bus.publish(subject, b"1")
    assert contents(await soon(waiting)) == [b"1"]


@pytest.mark.parametrize(("stream", "verb", "left"), [(TASKS, "ack", 0), (EPISODES, "ack", 1), (TASKS, "term", 0)])
async def test_a_task_that_is_settled_is_gone_for_good_and_an_episode_stays_in_its_log(bus, ns, stream, verb, left):
    subject, consumer, delivery = await claimed(bus, ns, stream, ack_wait_s=WAIT_S)
    for _ in range(2):
        await getattr(delivery, verb)()
    assert await soon(consumer.fetch(1, 2 * WAIT_S)) == []
    assert len(await bus.replay(stream, subject)) == left


async def test_what_is_not_acked_in_time_is_delivered_again(bus, ns):
    subject, consumer, first = await claimed(bus, ns, ack_wait_s=WAIT_S)
    second = await claim(consumer)
    assert first.stored == second.stored == Stored(subject, first.stored.sequence, b"1")
    assert (first.num_delivered, second.num_delivered) == (1, 2)
    await first.ack()
    assert await bus.replay(TASKS, subject) == []


async def test_progress_starts_the_ack_wait_anew(bus, ns):
    subject = subjects.task(ns, "job")
    for data in (b"dead", b"slow"):
        await bus.publish(subject, data)
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject, ack_wait_s=WAIT_S)
    _, slow = await soon(consumer.fetch(2, 5))
    while not (again := await soon(consumer.fetch(1, WAIT_S / 8))):
        renewed_at = now()
        await slow.in_progress()
    while contents(again) != [b"slow"]:
        again = [await claim(consumer)]
    assert now() - renewed_at >= 0.9 * WAIT_S


async def test_a_nak_brings_it_back_at_once_or_after_a_delay(bus, ns):
    _, consumer, first = await claimed(bus, ns, ack_wait_s=3600)
    await first.nak()
    second, begun = await claim(consumer), now()
    await second.nak(WAIT_S)
    third = await claim(consumer)
    assert third.num_delivered == 3
    assert now() - begun >= 0.9 * WAIT_S


async def test_members_of_one_consumer_share_what_is_left_and_two_consumers_do_not(dial, ns):
    subject = subjects.episode(ns, "job")
    one, other = await dial("one"), await dial("other")
    for number in range(10):
        await one.publish(subject, b"%d" % number)
    mine = await one.consumer(EPISODES, subjects.consumer(ns, "job", "shared"), subject)
    found = await soon(mine.fetch(5, 5))
    yours = await other.consumer(EPISODES, subjects.consumer(ns, "job", "shared"), subject)
    found += await soon(yours.fetch(10, 5))
    assert contents(found) == [b"%d" % number for number in range(10)]
    alone = await other.consumer(EPISODES, subjects.consumer(ns, "job", "alone"), subject)
    assert len(await soon(alone.fetch(20, 5))) == 10


async def test_no_more_than_max_pending_are_out_at_once(bus, ns):
    subject = subjects.episode(ns, "job")
    for number in range(5):
        await bus.publish(subject, b"%d" % number)
    consumer = await bus.consumer(EPISODES, subjects.consumer(ns, "job"), subject, max_pending=3, ack_wait_s=3600)
    held = await soon(consumer.fetch(5, 60))
    assert len(held) == 3
    assert await soon(consumer.fetch(5, 0.05)) == []
    await held[0].ack()
    assert contents(await soon(consumer.fetch(5, 60))) == [b"3"]


async def test_a_cancelled_fetch_keeps_nothing_to_itself(bus, ns):
    subject = subjects.task(ns, "job")
    consumer = await bus.consumer(TASKS, subjects.consumer(ns, "job"), subject, ack_wait_s=3600)
    cancelled = asyncio.create_task(consumer.fetch(10, 60))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    await bus.publish(subject, b"1")
    assert (await claim(consumer)).stored.data == b"1"


async def test_a_deleted_consumer_is_refused_ends_waiting_fetches_and_begins_anew(bus, ns):
    subject, consumer, delivery = await claimed(bus, ns, EPISODES)
    name = subjects.consumer(ns, "job")
    waiting = asyncio.create_task(consumer.fetch(1, 3600))
    assert await soon(consumer.fetch(1, 0.05)) == []
    for _ in range(2):
        await bus.delete_consumer(EPISODES, name)
    for call in (waiting, consumer.fetch(1, 5), delivery.ack()):
        with pytest.raises(BusRefused, match=name):
            await soon(call)
    assert (await claim(await bus.consumer(EPISODES, name, subject))).stored.data == b"1"


async def test_two_consumers_cannot_claim_the_same_tasks(bus, ns):
    await bus.consumer(TASKS, subjects.consumer(ns, "job"), subjects.task(ns, "job"))
    with pytest.raises(BusRefused, match=subjects.consumer(ns, "other")):
        await bus.consumer(TASKS, subjects.consumer(ns, "other"), subjects.task(ns, "*"))
    await bus.consumer(TASKS, subjects.consumer(ns, "another"), subjects.task(ns, "another"))


async def test_claims_of_a_consumer_that_is_not_there_yet_wait_for_it(dial, bus, ns):
    subject, name = subjects.task(ns, "job"), subjects.consumer(ns, "job", "sandbox")
    claims = await (await dial("sandbox")).claims(TASKS, name, ack_wait_s=30)
    assert await soon(claims.fetch(1, 0.05)) == []
    waiting = asyncio.create_task(claims.fetch(1, 60))
    await bus.consumer(TASKS, name, subject)
    await bus.publish(subject, b"1")
    (delivery,) = await soon(waiting)
    await delivery.ack()
    assert await bus.replay(TASKS, subject) == []
    await bus.delete_consumer(TASKS, name)
    assert await soon(claims.fetch(1, 0.05)) == []
