"""Wait for an event with a timeout, without losing a cancellation.

`asyncio.wait_for` of Python 3.11 swallows a cancellation that arrives at the moment when the event is set; a
loop around it then never ends.
"""

import asyncio
import contextlib


async def pause(event: asyncio.Event, timeout_s: float) -> None:
    """Sleep until the event is set or the timeout is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
