"""The compute thread: fair, one at a time, and never left half-way."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch

from marlaas_worker.trainer.compute import Compute


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


async def test_agents_that_have_work_take_turns(compute):
    order: list[str] = []

    async def agent(name: str) -> None:
        for _ in range(3):
            await compute.run(lambda: order.append(name), name)

    await asyncio.gather(agent("a"), agent("b"), agent("c"))
    assert order == ["a", "b", "c"] * 3
    assert sum(compute.busy_s_by_account.values()) == pytest.approx(compute.busy_s)


async def test_work_that_is_cancelled_however_often_is_over_before_the_next_begins(compute):
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


async def test_what_work_raises_comes_out_and_the_thread_lives_on(compute):
    with pytest.raises(ZeroDivisionError):
        await compute.run(lambda: 1 // 0)
    assert await compute.run(lambda: 7) == 7
