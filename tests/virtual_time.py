"""Tests in virtual time: when nothing is ready, the loop's clock jumps to the next timer, so that an hour's timeout takes no time.

A module, or a folder in its conftest.py, asks for it in one line; its async tests and fixtures then run on a `VirtualLoop`:

    from tests import virtual_time

    event_loop_policy = virtual_time.event_loop_policy

`asyncio.sleep`, `asyncio.timeout`, `asyncio.wait_for` and `loop.call_later` follow the virtual clock. So does code whose clock
is injected: pass `virtual_time.now`, also to `MemoryServer` and as a harness's clock. For code that calls `time.monotonic()`
itself, request the fixture `monotonic` (assigned in the module or conftest as above); a default argument
`clock=time.monotonic` was bound at import and stays real.

Use it only where everything that a test waits for happens in this loop: the bus and blobs in memory, fakes, files,
`asyncio.to_thread` (time stands still while the thread works), both ends of a socket pair. Do not use it with processes, servers,
threads of the test's own or a real engine: the loop does not know that they are at work, and time jumps past every timeout.
A test whose coroutines all wait without a timer fails at once with `Stuck`.
"""

import asyncio
import time

import pytest
from bench.virtual_time import Stuck, VirtualLoop

__all__ = ["Stuck", "VirtualLoop", "event_loop_policy", "monotonic", "now"]

START = 1000.0
"""A loop's first time: unlike 0, it cannot be mistaken for "never"."""


class _Policy(asyncio.DefaultEventLoopPolicy):
    """Every new loop is a virtual one. latest: the newest."""

    latest: VirtualLoop | None = None

    def new_event_loop(self) -> VirtualLoop:
        _Policy.latest = VirtualLoop(START)
        return _Policy.latest


def now() -> float:
    """The virtual time, also in a thread and before the loop runs."""
    return START if _Policy.latest is None else _Policy.latest.time()


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return _Policy()


@pytest.fixture
def monotonic(monkeypatch: pytest.MonkeyPatch) -> None:
    """`time.monotonic()` is the virtual time."""
    monkeypatch.setattr(time, "monotonic", now)
