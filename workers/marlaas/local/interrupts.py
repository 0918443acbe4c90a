"""Ctrl-C as two events: the first asks to drain, the second to stop at once."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The user asked to stop."""


class Interrupts:
    """Sets `first`, then `second`, on Ctrl-C, SIGTERM or SIGHUP. A third signal exits at once; the watchdog then cleans up.

    A signal that the parent has set to be ignored (`nohup`, a shell's background commands) stays ignored.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while the context is open."""
        loop = asyncio.get_running_loop()
        heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in heard:
            loop.add_signal_handler(number, self._note)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)

    def _note(self) -> None:
        if self.second.is_set():
            os._exit(EXIT_INTERRUPTED)
        (self.second if self.first.is_set() else self.first).set()

    async def unless(self, event: asyncio.Event, work: Awaitable[T]) -> T:
        """Await `work`; when the event is set, cancel it and raise Interrupted."""
        task = asyncio.ensure_future(work)
        signalled = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signalled.cancel()
            if not task.done():
                task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            raise Interrupted
        return task.result()


async def first_of(events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Sleep until one of the events is set or the timeout expires."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
