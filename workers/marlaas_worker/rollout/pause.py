"""Waiting for an event with a bound, without ever losing a cancellation.

`asyncio.wait_for` of Python 3.11 returns as if nothing had happened when it is cancelled in the moment in which the event is set; a loop around
it then never ends.
"""

import asyncio
import contextlib


async def pause(event: asyncio.Event, timeout_s: float) -> None:
    """Sleep until the event or the timeout."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
