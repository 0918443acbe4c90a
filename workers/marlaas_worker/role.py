"""What every role is given, and the life of a role's process: connect, serve until told to stop, drain."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_worker.metrics import Metrics


@dataclass(frozen=True, slots=True)
class RoleContext:
    """One worker's surroundings.

    name: the replica's name, the same after a restart (as a StatefulSet's pod). scratch: a local folder of its own. stop: set when the
    process was asked to end; a role then drains and returns. now: unix seconds. vitals: where the role says how it is.
    creds: the file of the bus's credentials, if it has one.
    """

    name: str
    bus: Bus
    blobs: Blobs
    scratch: Path
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    now: Callable[[], float] = time.time
    metrics: Metrics = field(default_factory=Metrics)
    creds: Path | None = None


async def wait_for(event: asyncio.Event, timeout_s: float) -> bool:
    """Sleep until the event or the timeout; True if the event is set.

    Not `asyncio.wait_for`, which up to Python 3.11 swallows a cancellation that comes together with the event.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()
