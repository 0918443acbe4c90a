"""Reads one agent's GROUPS log: first a replay, then a durable consumer; acks the messages of committed steps."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeGuard, TypeVar

from marlaas_api import subjects, wire
from marlaas_api.bus import BusRefused, BusUnavailable, Consumer, Delivery
from marlaas_api.messages import GroupLogEntry, GroupReady, StepClosed
from marlaas_worker.trainer.assignment import Assignment
from marlaas_worker.trainer.commit import patiently
from marlaas_worker.trainer.inbox import LogInvalid, StepInbox
from marlaas_worker.trainer.shared import TrainerDependencies

log = logging.getLogger(__name__)
T = TypeVar("T")

ACK_WAIT_S = 60.0
FETCH_S = 5.0
FETCH_BATCH = 256


class Intake:
    """Fills an inbox, and sets `changed` after each message.

    The consumer delivers new messages. Messages that an earlier trainer claimed and did not ack are in the replay, so
    they need not be redelivered first.
    """

    def __init__(self, dependencies: TrainerDependencies, assignment: Assignment, inbox: StepInbox) -> None:
        self._dependencies, self._assignment, self._inbox = dependencies, assignment, inbox
        self._unsettled: list[tuple[int, Delivery]] = []
        self._renewed_at = 0.0
        self.changed = asyncio.Event()

    async def replay(self) -> None:
        """Read the log up to now. Raises LogInvalid."""
        bus = self._dependencies.context.bus
        stored = await self._patiently(lambda: bus.replay(subjects.GROUPS, self._assignment.groups))
        for message in stored:
            await self._take(message.data)

    async def follow(self) -> None:
        """Read new messages until cancelled; recreate a consumer that was deleted. Raises LogInvalid, BusRefused."""
        while True:
            consumer = await self._patiently(self._consumer)
            try:
                await self._follow(consumer)
            except BusRefused as error:
                log.warning("%s: %s; the consumer is made anew", self._assignment.consumer, error)
                await asyncio.sleep(self._dependencies.timing.retry_s)

    async def settle(self) -> None:
        """Ack the messages of committed steps. A message whose ack fails is redelivered and acked then."""
        committed = [delivery for step, delivery in self._unsettled if step <= self._inbox.committed_step]
        self._unsettled = [pair for pair in self._unsettled if pair[0] > self._inbox.committed_step]
        with contextlib.suppress(BusUnavailable, BusRefused):
            for delivery in committed:
                await delivery.ack()

    async def _follow(self, consumer: Consumer) -> None:
        while True:
            for delivery in await self._patiently(lambda: consumer.fetch(FETCH_BATCH, FETCH_S)):
                message = await self._take(delivery.stored.data)
                step = self._inbox.committed_step if message is None else message.step
                self._unsettled.append((step, delivery))
            await self.settle()
            await self._renew()

    async def _consumer(self) -> Consumer:
        training = self._assignment.document.spec.training
        return await self._dependencies.context.bus.consumer(
            subjects.GROUPS,
            self._assignment.consumer,
            self._assignment.groups,
            ack_wait_s=ACK_WAIT_S,
            max_pending=1000 + 4 * (training.max_staleness + 2) * training.groups_per_step,
        )

    async def _take(self, data: bytes) -> GroupReady | StepClosed | None:
        """Add a message to the inbox and return it.

        None for a message of another job of the same name, for a group that is not trained, and for the end of a step
        without groups.
        """
        message = await wire.unpack(data, self._dependencies.context.blobs)
        if not isinstance(message, GroupLogEntry):
            raise LogInvalid(f"{self._assignment.groups} carries a {type(message).__name__}")
        if message.uid != self._assignment.ref.uid or not _is_trained(message):
            return None
        self._inbox.add(message)
        self.changed.set()
        return message

    async def _renew(self) -> None:
        """Extend the claims on messages whose step is not committed yet."""
        now = asyncio.get_running_loop().time()
        if now - self._renewed_at > ACK_WAIT_S / 3:
            self._renewed_at = now
            with contextlib.suppress(BusUnavailable, BusRefused):
                for _, delivery in list(self._unsettled):
                    await delivery.in_progress()

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        return await patiently(call, self._assignment.groups, self._dependencies.timing.retry_s)


def _is_trained(message: GroupLogEntry) -> TypeGuard[GroupReady | StepClosed]:
    return isinstance(message, GroupReady) or (isinstance(message, StepClosed) and message.num_groups > 0)
