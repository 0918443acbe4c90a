"""Places for episodes: how many of a job's episodes run at once in a sandbox.

A sandbox begins with few. 32 jobs that begin together would otherwise fork 2,000 processes before an engine on the same
machine has generated a token.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

FIRST_EPISODES, FIRST_S = 8, 5.0
"""Number of places at first, and seconds after the environment's load at which all others open. They open earlier if an episode ends."""


class EpisodePlaces:
    """Limits how many episodes run at once: at first `FIRST_EPISODES`, or `concurrency` if that is less; later `concurrency`.

    concurrency: `environment.concurrency` of the job.
    """

    def __init__(self, concurrency: int) -> None:
        self._num_withheld = max(0, concurrency - FIRST_EPISODES)
        self._free = asyncio.Semaphore(concurrency - self._num_withheld)

    async def wait(self, stop: asyncio.Event) -> bool:
        """Wait until a place is free, without taking it; return False if `stop` is set first."""
        stopping = asyncio.create_task(stop.wait())
        acquiring = asyncio.create_task(self._free.acquire())
        await asyncio.wait({stopping, acquiring}, return_when=asyncio.FIRST_COMPLETED)
        if acquiring.done():
            self._free.release()
        acquiring.cancel()
        stopping.cancel()
        return not stop.is_set()

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it for an episode while the context is open."""
        async with self._free:
            yield
        self._open()

    async def open_after(self, loaded: asyncio.Event) -> None:
        """Wait until `FIRST_S` after `loaded` is set, then open all places. loaded: set once the environment is loaded."""
        await loaded.wait()
        await asyncio.sleep(FIRST_S)
        self._open()

    def _open(self) -> None:
        for _ in range(self._num_withheld):
            self._free.release()
        self._num_withheld = 0
