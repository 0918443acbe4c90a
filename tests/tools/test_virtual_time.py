"""tests/virtual_time.py: hours pass at once, also beside a thread; coroutines that can never go on fail the test."""

import asyncio
import time

import pytest

from tests import virtual_time

event_loop_policy = virtual_time.event_loop_policy
monotonic = virtual_time.monotonic


async def test_timers_end_in_their_order_and_at_their_time(monotonic):
    order = []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((seconds, time.monotonic() - virtual_time.START))

    await asyncio.gather(sleeper(7200.0), sleeper(1.5), sleeper(60.0))
    assert order == [(1.5, 1.5), (60.0, 60.0), (7200.0, 7200.0)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600.0):
            await asyncio.Event().wait()
    assert virtual_time.now() == virtual_time.START + 10800.0


async def test_time_stands_still_while_a_thread_works():
    async with asyncio.timeout(0.001):
        await asyncio.to_thread(time.sleep, 0.05)
    assert virtual_time.now() == virtual_time.START


def test_coroutines_that_wait_for_each_other_fail_at_once():
    with pytest.raises(virtual_time.Stuck), asyncio.Runner(loop_factory=virtual_time.VirtualLoop) as runner:
        runner.run(asyncio.Event().wait())
