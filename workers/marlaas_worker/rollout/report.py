"""Publishes this replica's report to KV `replicas`: readiness, proven versions and usage."""

import asyncio
import logging
from collections.abc import Callable

import psutil

from marlaas_api import subjects, wire
from marlaas_api.bus import Bucket
from marlaas_api.errors import MarlaasError
from marlaas_api.messages import ReplicaReport
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.pause import pause

REPORT_S = 2.0
_log = logging.getLogger(__name__)


class Reporter:
    """Publishes a report every two seconds, and at once after `changed`. `compose` builds it from the resident bytes."""

    def __init__(self, context: RoleContext, pool: str, compose: Callable[[int], ReplicaReport]) -> None:
        self._bus = context.bus
        self._key = subjects.replica_key("rollout", pool, context.name)
        self._compose = compose
        self._bucket: Bucket | None = None
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Wake `run` to publish a report now."""
        self._changed.set()

    async def run(self) -> None:
        """Publish reports, until cancelled."""
        while True:
            self._changed.clear()
            await self.write()
            await pause(self._changed, REPORT_S)

    async def write(self) -> None:
        """Publish a report now. If the bus is unavailable, the report is skipped; the next one replaces it."""
        report = self._compose(await asyncio.to_thread(resident_bytes))
        try:
            await (await self._open()).put(self._key, wire.encode(report))
        except MarlaasError as error:
            _log.warning("could not report: %s", error)

    async def withdraw(self) -> None:
        """Delete this replica's report."""
        try:
            await (await self._open()).delete(self._key)
        except MarlaasError as error:
            _log.warning("could not withdraw the report: %s", error)

    async def _open(self) -> Bucket:
        self._bucket = self._bucket or await self._bus.bucket(subjects.REPLICAS)
        return self._bucket


def resident_bytes() -> int:
    """Return the resident memory of this process and all its descendants."""
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
