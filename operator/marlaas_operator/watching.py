"""Supervisor of a watch: runs it in its own thread and event loop, and restarts it whenever it ends."""

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
"""Watches until the event, which belongs to the watcher's loop, is set."""

Told = Callable[[str], None]
"""Called in the caller's loop with the error that ended the watch; with an empty text once the watch works again."""


class Watcher:
    """Runs `once` again and again until cancelled. settled_s: a watch that lasted this long counts as working."""

    def __init__(self, once: Once, told: Told, settled_s: float = SETTLED_S) -> None:
        self._once = once
        self._told = told
        self._settled_s = settled_s
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._inner: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
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
                with contextlib.suppress(RuntimeError):  # the loop has just been closed
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
        """Run the watch once; return whether it lasted `settled_s`, and the error text."""
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
        # Thread boundary: the watch is restarted after any error. A CancelledError from inside would be mistaken for our own cancellation.
        except (Exception, asyncio.CancelledError) as error:
            return settled.is_set(), f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._inner = None
        return settled.is_set(), "without an error"
