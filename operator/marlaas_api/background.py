"""Tasks beside a block of code (`Bus.listen` is built on it), calls that run at once, and the graceful shutdown of a process by signals."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.asynccontextmanager
async def stop_on_signals(stop: asyncio.Event) -> AsyncIterator[None]:
    """Set the stop event on SIGTERM and SIGINT while the context is open."""
    loop = asyncio.get_running_loop()
    set_on_signals(loop, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def set_on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Have SIGTERM and SIGINT set the stop event, in place of the loop's present handlers."""
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


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


async def await_all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all calls at once and return their results. Raises the first error, but only after all calls have ended.

    Unlike a TaskGroup, it does not lose a cancellation that arrives while other calls end after the failure of one.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
