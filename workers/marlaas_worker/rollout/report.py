"""This replica's report in KV `replicas`: that it lives, what it holds and has proven, and what it spent."""

import asyncio
import logging
from collections.abc import Callable

import psutil

from marlaas_api import subjects, wire
from marlaas_api.errors import MarlaasError
from marlaas_api.messages import ReplicaReport
from marlaas_worker.role import RoleContext, wait_for

REPORT_S = 2.0
_log = logging.getLogger(__name__)


class Reporter:
    """Writes a report every two seconds, and at once when it is told that something changed. `compose` makes it, given resident bytes."""

    def __init__(self, context: RoleContext, pool: str, compose: Callable[[int], ReplicaReport]) -> None:
        self._bus = context.bus
        self._key = subjects.replica_key("rollout", pool, context.name)
        self._compose = compose
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Report soon."""
        self._changed.set()

    async def run(self) -> None:
        """Report, until cancelled."""
        while True:
            self._changed.clear()
            await self.write()
            await wait_for(self._changed, REPORT_S)

    async def write(self) -> None:
        """Report now; a bus that is away hears the next one."""
        report = self._compose(await asyncio.to_thread(resident_bytes))
        try:
            bucket = await self._bus.bucket(subjects.REPLICAS)
            await bucket.put(self._key, wire.encode(report))
        except MarlaasError as error:
            _log.warning("could not report: %s", error)

    async def withdraw(self) -> None:
        """Say that this replica is gone."""
        try:
            bucket = await self._bus.bucket(subjects.REPLICAS)
            await bucket.delete(self._key)
        except MarlaasError as error:
            _log.warning("could not withdraw the report: %s", error)


def resident_bytes() -> int:
    """Resident memory of this process and all below it."""
    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
