"""The work queue: one reconcile a key at a time, late rather than twice, patient with what fails."""

import asyncio

import pytest

from marlaas_operator.cluster.errors import Conflict, Invalid, TooMany, Unavailable
from marlaas_operator.work_queue import Schedule, WorkQueue, backoff_s


@pytest.fixture
def schedule() -> Schedule[str]:
    return Schedule()


def test_a_key_is_given_out_once_at_the_earliest_of_its_times_and_the_longest_due_first(
    schedule: Schedule[str],
) -> None:
    for at in (10.0, 5.0, 20.0):
        schedule.add("a", at)
    assert (schedule.take(4.0), schedule.next_at(), schedule.take(5.0), schedule.take(30.0)) == (None, 5.0, "a", None)
    for key, at in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        schedule.add(key, at)
    assert [schedule.take(9.0) for _ in range(3)] == ["early", "middle", "late"]


def test_a_key_comes_again_if_it_was_added_while_it_was_worked_on_or_asked_for_a_later_look(
    schedule: Schedule[str],
) -> None:
    schedule.add("a", 0.0)
    schedule.take(0.0)
    schedule.add("a", 0.0)
    assert (schedule.take(1.0), schedule.next_at()) == (None, None)
    schedule.done("a")
    assert schedule.take(1.0) == "a"
    schedule.done("a", next_at=7.0)
    assert (schedule.take(6.9), schedule.take(7.0)) == (None, "a")


def test_a_key_that_always_comes_before_the_later_look_it_asked_for_leaves_no_more_than_a_few_behind(
    schedule: Schedule[str],
) -> None:
    schedule.add("quiet", 5000.0)
    for second in range(1000):
        schedule.add("busy", float(second))
        assert schedule.take(float(second)) == "busy"
        schedule.done("busy", next_at=second + 600.0)
    assert len(schedule._heap) < 100
    assert (schedule.take(1598.9), schedule.take(1599.0), schedule.take(5000.0)) == (None, "busy", "quiet")


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (Unavailable("x"), [0.2, 0.4, 0.8, 1.6]),
        (Conflict("x"), [0.05, 0.1, 0.2, 0.4]),
        (Invalid("x"), [5.0, 10.0, 20.0, 40.0]),
        (TooMany("x", 3.0), [3.0, 3.0, 3.0, 3.0]),
    ],
)
def test_waits_double(error: Exception, waits: list[float]) -> None:
    assert [backoff_s(failures, error) for failures in (1, 2, 3, 4)] == waits
    assert backoff_s(1000, error) == 60.0


def test_a_failed_key_is_left_alone_for_its_wait_whatever_asks_for_it_meanwhile(schedule: Schedule[str]) -> None:
    schedule.add("a", 0.0)
    schedule.take(0.0)
    schedule.add("a", 0.0)
    assert schedule.failed("a", Unavailable("x"), 0.0) == 0.2
    assert (schedule.take(0.1), schedule.take(0.2)) == (None, "a")
    schedule.done("a")
    assert schedule.failures("a") == 0


def test_news_of_a_key_that_has_long_failed_is_looked_at_soon(schedule: Schedule[str]) -> None:
    for at in (0.0, 10.0, 20.0):
        schedule.add("a", at)
        schedule.take(at)
        schedule.failed("a", Invalid("x"), at)
    schedule.add("a", 41.0)
    schedule.take(41.0)
    schedule.add("a", 41.5)
    assert schedule.failed("a", Invalid("x"), 42.0) == 1.0


def test_when_the_server_asks_for_patience_no_other_key_is_begun_either(schedule: Schedule[str]) -> None:
    schedule.add("a", 0.0)
    schedule.add("b", 0.0)
    schedule.take(0.0)
    schedule.failed("a", TooMany("slow down", 5.0), 1.0)
    assert (schedule.take(5.9), schedule.next_at(), schedule.take(6.0)) == (None, 6.0, "b")


async def test_stopping_finishes_what_was_begun_and_begins_nothing_more() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    async def handle(key: str) -> float | None:
        begun.set()
        await may_end.wait()
        ended.append(key)
        return None

    queue = WorkQueue(handle, now=asyncio.get_running_loop().time, num_workers=1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(queue.run())
        queue.add("first")
        await begun.wait()
        queue.add("second")
        queue.stop()
        may_end.set()
    assert ended == ["first"]
