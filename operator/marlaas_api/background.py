"""A context manager that runs one task beside a block of code; `Bus.listen` is built on it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` while the block runs; cancel it when the block ends.

    If `work` fails, the block is cancelled and the context raises the error, so that no failure goes unnoticed. A
    single error, of `work` or of the block, is raised as itself and not as an exception group of one.
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
