"""Publishes this replica's report to KV `replicas`: readiness, proven versions and usage.

Engine time is the seconds with a non-empty batch. While n requests are in the engine, each is charged 1/n of the time, so the shares of all
jobs add up to the busy time.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from marlaas_api import subjects, wire
from marlaas_api.bus import Bucket
from marlaas_api.errors import MarlaasError
from marlaas_api.messages import ReplicaReport
from marlaas_worker.role import RoleContext, wait_for


@dataclass(slots=True)
class EngineMeter:
    """Totals since the role's start. Tokens are generated tokens; keys are job uids; times are in seconds on the caller's clock."""

    busy_s: float = 0.0
    num_running: int = 0
    job_tokens: Counter[str] = field(default_factory=Counter)
    job_engine_s: dict[str, float] = field(default_factory=dict)
    _share_s: float = 0.0
    _at: float = 0.0  # Only used while a request runs; the first `enter` sets it.

    def enter(self, now: float) -> float:
        """Note that a request enters the engine; return the mark to pass to `leave`."""
        self.advance(now)
        self.num_running += 1
        return self._share_s

    def leave(self, mark: float, uid: str, now: float) -> None:
        """Note that a request left the engine, and charge its share of the time to its job."""
        self.advance(now)
        self.num_running -= 1
        self.job_engine_s[uid] = self.job_engine_s.get(uid, 0.0) + self._share_s - mark

    def advance(self, now: float) -> None:
        """Update the totals to `now`."""
        if self.num_running:
            self.busy_s += now - self._at
            self._share_s += (now - self._at) / self.num_running
        self._at = now


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
            await wait_for(self._changed, REPORT_S)

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
