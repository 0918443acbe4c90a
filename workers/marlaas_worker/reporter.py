"""Publishes what a worker reports: its state to KV `replicas` (readiness, agents or adapters, usage), and events of its jobs.

Job events are sentences for people, shown by `kubectl describe`. Nothing depends on them; a failed publish is only logged.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable

from marlaas_api import subjects, wire
from marlaas_api.bus import Bucket
from marlaas_api.errors import MarlaasError
from marlaas_api.messages import JobEvent, ReplicaReport
from marlaas_api.names import JobRef
from marlaas_worker.role import RoleContext, wait_for

REPORT_S = 2.0
MEASURE_S = 10.0
"""Interval of memory measurements: each reads /proc of every process of the machine to find the descendants."""
_log = logging.getLogger(__name__)


class Reporter:
    """Publishes a report every `interval_s` seconds, and at once after `changed`.

    Args:
        address: role and pool.
        compose: builds the report; its argument is the worker's resident memory in bytes.
    """

    def __init__(
        self,
        context: RoleContext,
        address: tuple[str, str],
        compose: Callable[[int], ReplicaReport],
        interval_s: float = REPORT_S,
    ) -> None:
        role, pool = address
        self._bus, self._waits = context.bus, context.waits
        self._key = subjects.replica_key(role, pool, context.name)
        self._compose = compose
        self._interval_s = interval_s
        self._bucket: Bucket | None = None
        self._changed = asyncio.Event()
        self._rss_bytes = 0
        self._measured_at = -math.inf

    def changed(self) -> None:
        """Wake `run` to publish a report now."""
        self._changed.set()

    async def run(self) -> None:
        """Publish reports, until cancelled."""
        while True:
            self._changed.clear()
            await self.write()
            await wait_for(self._changed, self._interval_s)

    async def write(self) -> None:
        """Publish a report now. If the bus is unavailable, the report is skipped; the next one replaces it."""
        try:
            await self.publish()
        except MarlaasError as error:
            _log.warning("could not report: %s", error)

    async def publish(self) -> None:
        """Publish a report now. Raises the errors of the bus."""
        report = self._compose(await self._measure()).model_copy(update={"waits": self._waits.reported()})
        await (await self._open()).put(self._key, wire.encode(report))

    async def _measure(self) -> int:
        """Return `resident_bytes`, measured at most `MEASURE_S` ago."""
        now = time.monotonic()
        if now - self._measured_at >= MEASURE_S:
            self._measured_at, self._rss_bytes = now, await asyncio.to_thread(resident_bytes)
        return self._rss_bytes

    async def withdraw(self) -> None:
        """Delete this replica's report. If the bus is unavailable, the report stays until it expires."""
        try:
            await (await self._open()).delete(self._key)
        except MarlaasError as error:
            _log.warning("could not withdraw the report: %s", error)

    async def _open(self) -> Bucket:
        self._bucket = self._bucket or await self._bus.bucket(subjects.REPLICAS)
        return self._bucket


def resident_bytes() -> int:
    """Return the resident memory of this process and all its descendants, in bytes."""
    import psutil  # here, because the orchestrator only publishes events

    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total


class EventEmitter:
    """Publishes job events of one role. `emit` publishes at once. `queue` returns at once, and `run` publishes the queued events.

    role: the role's name, such as `rollout`.
    """

    def __init__(self, context: RoleContext, role: str) -> None:
        self._bus, self._now, self._role = context.bus, context.now, role
        self._queued: asyncio.Queue[tuple[JobEvent, str | None]] = asyncio.Queue()

    async def emit(self, job: JobRef, reason: str, message: str) -> None:
        """Publish an event of a job. reason: one word in CamelCase. message: the sentence for people."""
        await self._publish(self._event(job, reason, message), None)

    def queue(self, job: JobRef, reason: str, message: str, once: str | None = None) -> None:
        """Queue an event of a job.

        Args:
            reason, message: as for `emit`.
            once: message id for deduplication: all replicas together publish the event once in two minutes. None: no deduplication.
        """
        self._queued.put_nowait((self._event(job, reason, message), once))

    async def run(self) -> None:
        """Publish queued events, until cancelled."""
        while True:
            await self._publish(*await self._queued.get())

    def _event(self, job: JobRef, reason: str, message: str) -> JobEvent:
        return JobEvent(
            namespace=job.namespace,
            job=job.name,
            uid=job.uid,
            role=self._role,
            at=self._now(),
            reason=reason,
            message=message,
        )

    async def _publish(self, event: JobEvent, once: str | None) -> None:
        subject = subjects.event(event.namespace, event.job, self._role)
        try:
            await self._bus.publish(subject, wire.encode(event), message_id=once)
        except MarlaasError:
            _log.exception("event of %s not published: %s", event.ref, event.message)
