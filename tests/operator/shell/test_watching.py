"""A watcher that dies is started anew, says so meanwhile, and ends when it is told to."""

import asyncio
import threading

from marlaas_operator.watching import Watcher


async def test_a_watcher_that_ends_begins_anew_and_that_is_told() -> None:
    runs: list[threading.Thread] = []
    told: asyncio.Queue[str] = asyncio.Queue()

    async def once(halt: asyncio.Event) -> None:
        runs.append(threading.current_thread())
        if len(runs) == 1:
            raise ValueError("no valid credentials")
        if len(runs) == 2:
            return
        await halt.wait()

    watcher = asyncio.create_task(Watcher(once, told.put_nowait, settled_s=0.01).run())
    async with asyncio.timeout(20):
        heard = [await told.get() for _ in range(3)]
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    assert heard == ["ValueError: no valid credentials", "without an error", ""]
    assert threading.main_thread() not in runs


async def test_a_watcher_that_is_cancelled_from_within_begins_anew_too() -> None:
    told: asyncio.Queue[str] = asyncio.Queue()

    async def once(halt: asyncio.Event) -> None:
        raise asyncio.CancelledError

    watcher = asyncio.create_task(Watcher(once, told.put_nowait).run())
    async with asyncio.timeout(20):
        assert await told.get() == "CancelledError: "
        assert not watcher.done()
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def test_a_watcher_that_waits_for_its_next_try_ends_at_once() -> None:
    told: asyncio.Queue[str] = asyncio.Queue()

    async def once(halt: asyncio.Event) -> None:
        raise ValueError("again")

    watcher = asyncio.create_task(Watcher(once, told.put_nowait).run())
    async with asyncio.timeout(20):
        await told.get()
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
