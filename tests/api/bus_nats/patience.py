"""How a test waits for a bus that may be away."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from marlaas_api import subjects
from marlaas_api.bus import BusUnavailable

T = TypeVar("T")
EPISODES, TASKS = subjects.EPISODES, subjects.TASKS
EPISODE, TASK = subjects.episode("team-a", "job"), subjects.task("team-a", "job")


async def soon(awaitable: Awaitable[T]) -> T:
    """What ends on any machine that does not hang."""
    return await asyncio.wait_for(awaitable, 60)


async def persist(call: Callable[[], Awaitable[T]]) -> T:
    """As callers do: what is Retryable is tried again."""
    while True:
        try:
            return await call()
        except BusUnavailable:
            continue
