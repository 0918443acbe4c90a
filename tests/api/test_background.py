"""One task beside a block: whichever fails is heard, and neither outlives the other."""

import asyncio

import pytest

from marlaas_api.background import background


async def test_the_work_runs_beside_the_block_and_ends_with_it() -> None:
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


async def test_work_that_is_done_does_not_end_the_block() -> None:
    done = asyncio.Event()

    async def work() -> None:
        done.set()

    async with background(work()):
        await done.wait()
        await asyncio.sleep(0)


async def test_failing_work_cancels_the_block_and_comes_out_as_itself() -> None:
    async def work() -> None:
        raise LookupError("work")

    with pytest.raises(LookupError, match="work"):
        async with background(work()):
            await asyncio.Event().wait()


async def test_a_failing_block_comes_out_as_itself() -> None:
    with pytest.raises(LookupError, match="block"):
        async with background(asyncio.Event().wait()):  # type: ignore[arg-type]
            raise LookupError("block")


async def test_if_both_fail_both_are_heard() -> None:
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise LookupError("work")

    async def block() -> None:
        async with background(work()):
            await asyncio.sleep(0)
            raise KeyError("block")

    with pytest.raises(ExceptionGroup) as both:
        await block()
    assert {type(error) for error in both.value.exceptions} == {LookupError, KeyError}


async def test_cancelling_the_block_is_not_swallowed() -> None:
    entered = asyncio.Event()

    async def block() -> None:
        async with background(asyncio.Event().wait()):  # type: ignore[arg-type]
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
