"""A watcher that may die: in a thread and an event loop of its own, started anew whenever it ends, whatever it ends of."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)

SETTLED_S = 10.0
_AGAIN_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)

Once = Callable[[asyncio.Event], Awaitable[None]]
"""Watches until the event, which belongs to the watcher's loop."""

Told = Callable[[str], None]
"""Told, in the caller's loop, what is wrong with the watching; an empty text when it goes well again."""


class Watcher:
    """Runs `once` again and again until told to stop. told: see above. settled_s: a watch that lasted so long goes well."""

    def __init__(self, once: Once, told: Told, settled_s: float = SETTLED_S) -> None:
        self._once = once
        self._told = told
        self._settled_s = settled_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="watcher") as thread:
            try:
                await loop.run_in_executor(thread, self._for_ever, loop)
            finally:
                self._stop()

    def _stop(self) -> None:
        self._stopped.set()
        with self._lock:
            if self._inner is not None:
                loop, halt = self._inner
                with contextlib.suppress(RuntimeError):  # it has just ended by itself
                    loop.call_soon_threadsafe(halt.set)

    def _for_ever(self, caller: asyncio.AbstractEventLoop) -> None:
        failures = 0
        while not self._stopped.is_set():
            settled, words = self._try(caller)
            failures = 0 if settled else failures + 1
            wait_s = _AGAIN_S[min(failures, len(_AGAIN_S) - 1)]
            if not self._stopped.is_set():
                log.warning("the watches ended (%s) and begin anew in %.1f s", words, wait_s)
                caller.call_soon_threadsafe(self._told, words)
                self._stopped.wait(wait_s)

    def _try(self, caller: asyncio.AbstractEventLoop) -> tuple[bool, str]:
        """Watch once; whether that had gone well for a while, and what ended it."""
        settled = threading.Event()

        async def watch() -> None:
            halt = asyncio.Event()
            loop = asyncio.get_running_loop()
            with self._lock:
                self._inner = loop, halt
            if self._stopped.is_set():
                return

            def settle() -> None:
                settled.set()
                caller.call_soon_threadsafe(self._told, "")

            timer = loop.call_later(self._settled_s, settle)
            try:
                await self._once(halt)
            finally:
                timer.cancel()

        try:
            asyncio.run(watch())
        # A thread's boundary: whatever it is, watching must go on. A cancellation from in there would pass for one of ours, and end it without a word.
        except (Exception, asyncio.CancelledError) as error:
            return settled.is_set(), f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._inner = None
        return settled.is_set(), "without an error"
