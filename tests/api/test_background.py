"""One task beside a block: whichever fails is heard, and neither outlives the other."""

import asyncio

import pytest

from marlaas_api.background import background


async def test_the_work_runs_beside_the_block_and_ends_with_it_or_before():
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with background(work()):
        await started.wait()
    assert ended.is_set()
    async with background(asyncio.sleep(0)):
        for _ in range(5):
            await asyncio.sleep(0)


async def fail(error: Exception) -> None:
    raise error


async def wait_and_fail(error: Exception) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        raise error


async def both_fail() -> None:
    async with background(wait_and_fail(LookupError("work"))):
        await asyncio.sleep(0)
        raise KeyError("block")


async def test_whichever_fails_alone_comes_out_as_itself_and_if_both_fail_both_are_heard():
    with pytest.raises(LookupError, match="work"):
        async with background(fail(LookupError("work"))):
            await asyncio.Event().wait()
    with pytest.raises(LookupError, match="block"):
        async with background(asyncio.sleep(3600)):
            raise LookupError("block")
    with pytest.raises(ExceptionGroup) as both:
        await both_fail()
    assert {type(error) for error in both.value.exceptions} == {LookupError, KeyError}


async def test_cancelling_the_block_is_not_swallowed():
    entered = asyncio.Event()

    async def block() -> None:
        async with background(asyncio.sleep(3600)):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
