"""The compute thread: fair, one at a time, and never left half-way."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from marlaas_worker.trainer.compute import Compute
from marlaas_worker.trainer.compute_queue import ComputeAccount


@pytest.fixture
def compute() -> Iterator[Compute]:
    made = Compute(1)
    yield made
    made.close()


async def test_all_work_runs_on_one_thread_that_is_not_the_event_loops(compute):
    threads = [await compute.run(threading.get_ident) for _ in range(3)]
    assert set(threads) != {threading.get_ident()}
    assert len(set(threads)) == 1
    assert await compute.run(torch.get_num_threads) == 1


async def test_work_that_is_cancelled_while_it_waits_lets_the_next_go_on(compute: Compute) -> None:
    gate, done = threading.Event(), []
    first = asyncio.create_task(compute.run(gate.wait))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(compute.run(lambda: done.append(1))) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    gate.set()
    await asyncio.gather(first, *waiting, return_exceptions=True)
    assert len(done) == 2


async def test_work_that_is_cancelled_as_its_turn_is_granted_lets_the_next_go_on() -> None:
    class Cancelling(Compute):
        victims: tuple[asyncio.Task[None], ...] = ()

        def _grant(self) -> None:
            super()._grant()
            for victim in self.victims:
                victim.cancel()

    compute, gate, done = Cancelling(1), threading.Event(), list[int]()
    first = asyncio.create_task(compute.run(gate.wait))
    await asyncio.sleep(0)
    victim = asyncio.create_task(compute.run(lambda: done.append(1)))
    await asyncio.sleep(0)
    compute.victims = (victim,)
    gate.set()
    await asyncio.gather(first, victim, return_exceptions=True)
    assert await compute.run(lambda: 7) == 7
    assert (victim.cancelled(), done) == (True, [])
    compute.close()


async def test_seconds_are_counted_by_agent_and_job_and_those_of_other_jobs_are_dropped(compute: Compute) -> None:
    accounts = [ComputeAccount("tenant", job, f"{job}.{agent}") for job, agent in (("a", "1"), ("a", "2"), ("b", "1"))]
    for account in accounts:
        with pytest.raises(ZeroDivisionError):  # counted too, and the thread lives on
            await compute.run(lambda: 1 // 0, account)
    one, two, other = map(compute.busy_s_of, accounts)
    assert min(one, two, other) > 0
    assert one + two == pytest.approx(compute.busy_s_by_job["a"])
    assert one + two + other == pytest.approx(compute.busy_s)
    compute.keep_accounts({"b", "c"})
    assert list(compute.busy_s_by_job) == ["b"]
    assert [compute.busy_s_of(account) for account in accounts] == [0.0, 0.0, other]


async def test_work_that_is_cancelled_however_often_is_over_before_the_next_begins(compute: Compute) -> None:
    running, go_on, over = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(running.set)
        go_on.wait()
        over.set()

    task = asyncio.create_task(compute.run(work))
    await running.wait()
    task.cancel()
    following = asyncio.create_task(compute.run(over.is_set))
    for _ in range(3):
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
    go_on.set()
    assert await following
    assert task.cancelled()
