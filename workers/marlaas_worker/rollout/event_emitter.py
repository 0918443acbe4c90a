"""Publishes this replica's job events, for people. Nothing depends on them; a failed publish is only logged."""

import asyncio
import logging

from marlaas_api import subjects, wire
from marlaas_api.errors import MarlaasError
from marlaas_api.messages import JobEvent
from marlaas_api.names import JobRef
from marlaas_worker.role import RoleContext

_ROLE = "rollout"
_log = logging.getLogger(__name__)


class EventEmitter:
    """Publishes events in the background, without delaying callers."""

    def __init__(self, context: RoleContext) -> None:
        self._bus = context.bus
        self._now = context.now
        self._untold: asyncio.Queue[tuple[JobEvent, str | None]] = asyncio.Queue()

    def emit(self, job: JobRef, reason: str, message: str, once: str | None = None) -> None:
        """Queue an event of a job.

        Args:
            once: message id for deduplication: all replicas together publish it once in two minutes.
        """
        event = JobEvent(
            namespace=job.namespace,
            job=job.name,
            uid=job.uid,
            role=_ROLE,
            at=self._now(),
            reason=reason,
            message=message,
        )
        self._untold.put_nowait((event, once))

    async def run(self) -> None:
        """Publish queued events, until cancelled."""
        while True:
            event, once = await self._untold.get()
            subject = subjects.event(event.namespace, event.job, _ROLE)
            try:
                await self._bus.publish(subject, wire.encode(event), message_id=once)
            except MarlaasError:
                _log.exception("could not tell of %s: %s", event.ref, event.message)
