"""Job events: sentences for people, shown by `kubectl describe`. Nothing depends on them; a failed publish is only logged."""

import asyncio
import logging

from marlaas_api import subjects, wire
from marlaas_api.errors import MarlaasError
from marlaas_api.messages import JobEvent
from marlaas_api.names import JobRef
from marlaas_worker.role import RoleContext

_log = logging.getLogger(__name__)


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
