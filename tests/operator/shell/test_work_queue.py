"""The work queue: one reconcile a key at a time, late rather than twice, patient with what fails."""

import asyncio

import pytest
from tests.tables import rows

from marlaas_api import bus
from marlaas_api.errors import MarlaasError
from marlaas_operator import cluster, work_queue
from marlaas_operator.cluster.resources import RLJOBS
from marlaas_operator.plan import AddFinalizer, RemoveFinalizer

ONE = cluster.Target(RLJOBS, "team-a", "one")
ACTIONS = (AddFinalizer("x"),)


def error_of(name: str) -> MarlaasError:
    return getattr(cluster if hasattr(cluster, name) else bus, name)("no")


@pytest.fixture
def schedule() -> work_queue.Schedule[str]:
    return work_queue.Schedule()


def test_a_key_is_given_out_once_at_the_earliest_of_its_times_and_the_longest_due_first(schedule):
    for at in (10.0, 5.0, 20.0):
        schedule.add("a", at)
    assert (schedule.take(4.0), schedule.next_at(), schedule.take(5.0), schedule.take(30.0)) == (None, 5.0, "a", None)
    for key, at in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        schedule.add(key, at)
    assert [schedule.take(9.0) for _ in range(3)] == ["early", "middle", "late"]


def test_a_key_comes_again_if_it_was_added_while_it_was_worked_on_or_asked_for_a_later_look(schedule):
    schedule.add("a", 0.0)
    schedule.take(0.0)
    schedule.add("a", 0.0)
    assert (schedule.take(1.0), schedule.next_at()) == (None, None)
    schedule.done("a")
    assert schedule.take(1.0) == "a"
    schedule.done("a", next_at=7.0)
    assert (schedule.take(6.9), schedule.take(7.0)) == (None, "a")


@pytest.mark.parametrize(("error", "words", "waits"), rows(__file__, "waits"))
def test_waits_double(error, words, waits):
    error = getattr(cluster, error)(*words)
    assert [work_queue.backoff_s(failures, error) for failures in (1, 2, 3, 4)] == waits
    assert work_queue.backoff_s(1000, error) == 60.0


def test_a_failed_key_is_left_alone_for_its_wait_whatever_asks_for_it_meanwhile(schedule):
    schedule.add("a", 0.0)
    schedule.take(0.0)
    schedule.add("a", 0.0)
    assert schedule.failed("a", cluster.Unavailable("x"), 0.0) == 0.2
    assert (schedule.take(0.1), schedule.take(0.2)) == (None, "a")
    schedule.done("a")
    assert schedule.failures("a") == 0


def test_when_the_server_asks_for_patience_no_other_key_is_begun_either(schedule):
    schedule.add("a", 0.0)
    schedule.add("b", 0.0)
    schedule.take(0.0)
    schedule.failed("a", cluster.TooMany("slow down", 5.0), 1.0)
    assert (schedule.take(5.9), schedule.next_at(), schedule.take(6.0)) == (None, 6.0, "b")


async def test_stopping_finishes_what_was_begun_and_begins_nothing_more():
    begun, may_end = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    async def handle(key: str) -> float | None:
        begun.set()
        await may_end.wait()
        ended.append(key)
        return None

    queue = work_queue.WorkQueue(handle, now=asyncio.get_running_loop().time, num_workers=1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(queue.run())
        queue.add("first")
        await begun.wait()
        queue.add("second")
        queue.stop()
        may_end.set()
    assert ended == ["first"]


@pytest.mark.parametrize(("name", "reason", "is_refusal"), rows(__file__, "reasons"))
def test_a_refusal_is_reported_at_once_and_a_transient_error_once_it_has_lasted(name, reason, is_refusal):
    backoff = work_queue.FailureBackoff()
    backoff.record(ONE, cluster.Unavailable("something else"), 100.0)
    backoff.record(ONE, error_of(name), 101.0)
    assert work_queue.is_refusal(error_of(name)) is is_refusal
    early = backoff.reportable(ONE, 100.0 + work_queue.LASTING_S - 0.1)
    assert early == ((reason, "no") if is_refusal else None)
    assert backoff.reportable(ONE, 100.0 + work_queue.LASTING_S) == (reason, "no")


def test_a_success_ends_the_failures():
    assert all(work_queue.is_transient(kind("no")) for kind in (cluster.Conflict, cluster.NoAnswer))
    assert work_queue.is_transient(cluster.TooMany("no", 1.0)) is not work_queue.is_transient(cluster.Terminating("no"))
    backoff = work_queue.FailureBackoff()
    backoff.record(ONE, cluster.Unavailable("no"), 100.0)
    assert (backoff.clear(ONE), backoff.clear(ONE)) == (True, False)
    backoff.record(ONE, cluster.Unavailable("no"), 109.0)
    assert backoff.reportable(ONE, 110.0) is None


def test_only_refused_actions_are_deferred_and_only_for_a_while():
    backoff = work_queue.FailureBackoff()
    backoff.record(ONE, cluster.Invalid("no"), 100.0)
    backoff.defer(ONE, ACTIONS, 100.0)
    assert backoff.deferred_s(ONE, ACTIONS, 110.0) == work_queue.REFUSED_AGAIN_S - 10.0
    assert backoff.deferred_s(ONE, (RemoveFinalizer("x"),), 110.0) is None
    assert backoff.deferred_s(ONE, ACTIONS, 100.0 + work_queue.REFUSED_AGAIN_S) is None
    assert backoff.deferred_s(ONE, ACTIONS, 50.0) is None, "the clock was set back"
