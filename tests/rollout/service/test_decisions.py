"""The pure parts: who is next, who owns what, who is charged, what is tried again, who gives way."""

import asyncio
from collections import Counter

import pytest

from marlaas_api.errors import Permanent, Retryable
from marlaas_worker.rollout.reception import owner
from marlaas_worker.rollout.slots import to_yield
from marlaas_worker.rollout.supervised_engine import EngineMeter, RequestLimiter, Rotation
from marlaas_worker.rollout.versions import FIRST_WAIT_S, LONGEST_WAIT_S, Retries

EPISODES = [f"u-t{number}-0-1" for number in range(600)]


def test_everybody_names_the_same_owner_whatever_the_order() -> None:
    assert all(owner(episode, ["a", "b", "c"]) == owner(episode, ["c", "a", "b"]) for episode in EPISODES)


def test_episodes_are_spread_over_replicas() -> None:
    owners = Counter(owner(episode, ["a", "b", "c"]) for episode in EPISODES)
    assert min(owners.values()) > 150


def test_only_a_lost_replicas_episodes_move() -> None:
    moved = [episode for episode in EPISODES if owner(episode, "abc") != owner(episode, "ab")]
    assert {owner(episode, "abc") for episode in moved} == {"c"}


def test_the_rotation_serves_jobs_in_turn_however_much_one_asks_for() -> None:
    rotation: Rotation[str] = Rotation()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        rotation.push(item[0], item)
    served = [rotation.pop() for _ in range(7)]
    assert served == ["a1", "b1", "c1", "a2", "b2", "a3", None]


def test_an_item_that_no_longer_waits_is_passed_over() -> None:
    rotation: Rotation[str] = Rotation()
    for item in ("a1", "b1", "b2"):
        rotation.push(item[0], item)
    rotation.remove("a", "a1")
    rotation.remove("a", "a1")
    rotation.remove("b", "b1")
    assert (rotation.pop(), rotation.pop(), len(rotation)) == ("b2", None, 0)


async def test_the_door_lets_in_no_more_than_fit() -> None:
    limiter, inside, most = RequestLimiter(3), 0, 0

    async def visit(number: int) -> None:
        nonlocal inside, most
        async with limiter.place(f"job-{number % 4}"):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(visit(number) for number in range(40)))
    assert (most, inside, limiter.num_waiting) == (3, 0, 0)


async def test_a_place_whose_owner_gave_up_goes_to_the_next() -> None:
    limiter = RequestLimiter(1)
    entered: list[str] = []
    leave = asyncio.Event()

    async def visit(name: str) -> None:
        async with limiter.place(name):
            entered.append(name)
            await leave.wait()

    visits = [
        asyncio.ensure_future(visit(name)) for name in ("first", "gone while waiting", "gone when called", "last")
    ]
    await asyncio.sleep(0)
    visits[1].cancel()
    await asyncio.sleep(0)
    visits[0].cancel()
    visits[2].cancel()
    leave.set()
    await asyncio.gather(*visits, return_exceptions=True)
    assert entered == ["first", "last"]
    async with asyncio.timeout(10), limiter.place("after all"):
        pass


def test_shares_of_the_engines_time_add_up_to_the_time_it_was_busy() -> None:
    meter = EngineMeter()
    a = meter.enter(10.0)
    b = meter.enter(12.0)
    meter.leave(a, "one", 16.0)
    meter.leave(b, "two", 17.0)
    meter.advance(100.0)
    c = meter.enter(100.0)
    meter.leave(c, "one", 101.0)
    assert meter.busy_s == pytest.approx(8.0)
    assert meter.job_engine_s == pytest.approx({"one": 2.0 + 2.0 + 1.0, "two": 2.0 + 1.0})


def test_what_may_succeed_later_is_tried_again_ever_more_rarely() -> None:
    retries = Retries()
    waits = []
    for _ in range(12):
        failure = retries.failed("v1", Retryable("away"), 100.0)
        assert failure.retry_at is not None
        waits.append(failure.retry_at - 100.0)
    assert waits[:3] == pytest.approx([FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S])
    assert waits[-1] == pytest.approx(LONGEST_WAIT_S)
    assert not retries.may_try("v1", 109.0)
    assert retries.may_try("v1", 110.1)
    assert retries.next_in_s(["v0", "v1"], 109.0) == pytest.approx(1.0)
    retries.succeeded("v1")
    assert retries.next_in_s(["v1"], 109.0) is None


def test_what_never_succeeds_is_refused_until_everything_begins_anew() -> None:
    retries = Retries()
    assert retries.failed("v1", Permanent("corrupt"), 0.0).retry_at is None
    assert not retries.may_try("v1", 1e9)
    assert retries.next_in_s(["v1"], 0.0) is None
    retries.clear()
    assert retries.may_try("v1", 0.0)


@pytest.mark.parametrize(
    ("running", "resident", "waiting", "expected"),
    [
        (["a", "b"], ["a", "b"], [], []),
        (["a", "b"], ["a", "b"], ["b"], []),
        (["a", "b"], ["a", "b"], ["c"], ["a"]),
        (["a", "b"], ["a", "b"], ["c", "a", "d"], ["a", "b"]),
        (["a"], ["a", "c"], ["c"], []),
        ([], ["a"], ["c"], []),
    ],
)
def test_as_many_running_versions_give_way_as_wait_without_a_slot(
    running: list[str], resident: list[str], waiting: list[str], expected: list[str]
) -> None:
    assert to_yield(running, resident, waiting) == frozenset(expected)
