"""A watcher that dies is started anew, more and more seldom; it says so meanwhile, and ends when it is told to."""

import asyncio
import threading
from collections.abc import Callable

from marlaas_operator.watching import Watcher

LOOKED_FOR_S = 20


class Story:
    """Runs of a watcher; what they do, in order: an error, a lasting watch that ends, one that ends when it is told to."""

    def __init__(self, *runs: BaseException | float | None, settled_s: float = 0.01) -> None:
        self.left = list(runs)
        self.waits: list[float] = []
        self.threads: set[threading.Thread] = set()
        self.told: asyncio.Queue[str] = asyncio.Queue()
        self.watcher = Watcher(self._once, self.told.put_nowait, settled_s)
        wait: Callable[[float | None], bool] = self.watcher._stopped.wait
        self.watcher._stopped.wait = lambda timeout=None: self.waits.append(timeout or 0.0) or wait(0)  # type: ignore

    async def _once(self, halt: asyncio.Event) -> None:
        self.threads.add(threading.current_thread())
        act = self.left.pop(0) if self.left else None
        if isinstance(act, BaseException):
            raise act
        if act is None:
            await halt.wait()
        elif act:  # without a pause no timer can run
            await asyncio.sleep(act)

    async def told_in_the_end(self, number: int) -> list[str]:
        """What the watcher says in this many reports, after which it is told to end."""
        running = asyncio.create_task(self.watcher.run())
        async with asyncio.timeout(LOOKED_FOR_S):
            told = [await self.told.get() for _ in range(number)]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return told


async def test_a_watcher_that_ends_begins_anew_and_that_is_told() -> None:
    story = Story(ValueError("no valid credentials"), 0.0, asyncio.CancelledError())
    assert await story.told_in_the_end(4) == [
        *("ValueError: no valid credentials", "without an error", "CancelledError: ", "")
    ]
    assert threading.main_thread() not in story.threads


async def test_the_waits_between_watches_that_fail_grow_until_one_has_lasted() -> None:
    story = Story(*(ValueError("again") for _ in range(7)), 0.2, ValueError("again"))
    await story.told_in_the_end(10)
    assert story.waits == [1.0, 2.0, 5.0, 10.0, 20.0, 20.0, 20.0, 0.5, 1.0]
