"""`RoleContext`, the objects that every role receives, and functions to wait for an event and to cancel tasks."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_worker.metrics import Metrics
from marlaas_worker.waits import Waits, WatchedBlobs


@dataclass(frozen=True, slots=True)
class RoleContext:
    """The objects that a worker's role uses: connections, folders, clock, metrics and the request to stop.

    Attributes:
        name: the replica's name, the same after a restart (as a StatefulSet's pod).
        bus: the connection to the bus.
        blobs: the blob store; its failures are recorded in `waits`.
        scratch: a local folder for this worker alone.
        stop: set when the process is asked to stop; the role then drains and returns.
        now: clock in Unix seconds.
        metrics: where the role registers its health and metrics.
        creds: file of the bus credentials; None: no credentials.
        shares_cpu: whether the role may change the CPU share of its session (`cpu_shares.set_share`). Set where one machine runs all roles,
            each in a session of its own.
        waits: failures because of which jobs wait on this replica, by job.
    """

    name: str
    bus: Bus
    blobs: Blobs
    scratch: Path
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    now: Callable[[], float] = time.time
    metrics: Metrics = field(default_factory=Metrics)
    creds: Path | None = None
    shares_cpu: bool = False
    waits: Waits = field(init=False)

    def __post_init__(self) -> None:
        waits = Waits(self.now)
        object.__setattr__(self, "waits", waits)
        object.__setattr__(self, "blobs", WatchedBlobs(self.blobs, waits))


async def end_tasks(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait until they have ended; their errors are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event or the timeout; return True if the event is set.

    `asyncio.wait_for` up to Python 3.11 swallows a cancellation that arrives together with the event, so it is
    not used.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
