"""An event loop in simulated time: nothing waits, time jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Stuck(Exception):
    """No callback is ready and no timer is set: what the coroutines wait for can never happen."""


class VirtualSelector(selectors.SelectSelector):
    """Selector of an event loop that never waits, except for functions that run in its executor."""

    def __init__(self, now: float) -> None:
        super().__init__()
        self.now = now
        self.in_threads = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self.in_threads:
            return super().select(None)
        if timeout is None:
            raise Stuck("every coroutine waits, and no timer is set")
        self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop in simulated time. Time stands still while a function runs in the loop's executor (`asyncio.to_thread`).

    start: the loop's first time, in seconds.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._virtual = VirtualSelector(start)
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> "asyncio.Future[T]":
        future = super().run_in_executor(executor, func, *args)
        self._virtual.in_threads += 1
        future.add_done_callback(self._left_thread)
        return future

    async def shutdown_default_executor(self) -> None:
        self._virtual.in_threads += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._virtual.in_threads -= 1

    def _left_thread(self, _: "asyncio.Future[Any]") -> None:
        self._virtual.in_threads -= 1
