"""One task beside a block of code: what `Bus.listen` is made of."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` while the block runs; it is cancelled at the block's end.

    If `work` fails, the block is cancelled and the error comes out of the context: nothing dies in silence. A single
    error, of either side, comes out as itself rather than as a group of one.
    """
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work)
            yield
            task.cancel()
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) > 1:
            raise
        raise errors.exceptions[0] from None
