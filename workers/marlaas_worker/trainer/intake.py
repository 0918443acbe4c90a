"""Reads one agent's part of its job's log (GROUPS), first by a replay, then through a durable consumer, into an inbox of uncommitted steps.

The inbox is pure: it yields each position once, in order. Messages of committed steps are acked.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from marlaas_api import subjects, wire
from marlaas_api.bus import BusRefused, BusUnavailable, Consumer, Delivery, Stored
from marlaas_api.errors import Permanent
from marlaas_api.messages import AgentClosed, GroupReady, IssueEntry, JobLogEntry
from marlaas_api.retries import patiently
from marlaas_worker.trainer.trained_agent import TrainedAgent


class LogInvalid(Permanent):
    """The job's log contradicts itself or the committed version."""


@dataclass(slots=True)
class _Step:
    """An uncommitted step: its messages so far, and the number of its groups that are taken.

    base_version: policy version at which the step trains, by its messages (`GroupReady`).
    follows: the agent's last step before this one that has groups; -1: there is none; None: the messages are of an earlier release.
    """

    base_version: int
    follows: int | None
    groups: dict[int, GroupReady] = field(default_factory=dict)
    closed: AgentClosed | None = None
    num_taken: int = 0


class StepInbox:
    """Messages of the job's log about one agent's steps that are not committed yet: a GroupReady for each group, an AgentClosed for each step's end.

    They may be added in any order. Adding the same message again has no effect. Groups are returned in the order of their positions in the step.

    Attributes:
        committed_step: number of the last committed step; -1: none.
        version: the agent's policy version after that step.
    """

    def __init__(self, committed_step: int, version: int) -> None:
        self.committed_step = committed_step
        self.version = version
        self._steps: dict[int, _Step] = {}

    def __bool__(self) -> bool:
        """Return whether the inbox holds messages of uncommitted steps."""
        return bool(self._steps)

    @property
    def is_within_step(self) -> bool:
        """Whether some groups of the current step are taken."""
        step = self._current()
        return step is not None and step.num_taken > 0

    def is_committed(self, message: GroupReady | AgentClosed) -> bool:
        """Return whether the message's step is already committed."""
        return message.step <= self.committed_step

    def add(self, message: GroupReady | AgentClosed) -> None:
        """Add a message. Raises LogInvalid if it contradicts an earlier one."""
        if self.is_committed(message):
            return
        step = self._steps.setdefault(message.step, _Step(message.base_version, message.follows))
        if isinstance(message, AgentClosed):
            known: GroupReady | AgentClosed | None = step.closed
            step.closed = step.closed or message
        else:
            known = step.groups.setdefault(message.position, message)
        if known is not None and known != message:
            raise LogInvalid(f"step {message.step} of {message.agent} is assigned twice: {known!r} and {message!r}")

    @property
    def has_gap(self) -> bool:
        """Whether a step is missing: the first step here must be trained after an uncommitted step whose messages have not arrived."""
        step = self._first()
        if step is None or step.follows is None:
            return step is not None and step.base_version > self.version
        return step.follows > self.committed_step

    def check_replayed(self, message: GroupReady | AgentClosed) -> None:
        """Check a message of a replay, right after `add`: no earlier step may be missing.

        A replay is in order, so messages of a missing step would have come before. (A consumer's messages may be out of order.)

        Raises:
            LogInvalid: an uncommitted step that must be trained before the message's step is missing.
        """
        if self.has_gap and not self.is_committed(message):
            self._check_base(message)

    def next_group(self) -> GroupReady | None:
        """Return the group at the current step's next position, or None if it has not arrived.

        Raises LogInvalid if the group does not follow the committed step and version, or was sampled by a later version.
        """
        step = self._current()
        group = None if step is None else step.groups.get(step.num_taken)
        if group is not None:
            self._check_base(group)
            if group.staleness < 0:
                raise LogInvalid(
                    f"group {group.group} was sampled at version {group.version}, after its base version {group.base_version}"
                )
        return group

    @property
    def is_complete(self) -> bool:
        """Whether the current step is closed and all of its groups have arrived."""
        step = self._current()
        return step is not None and step.closed is not None and len(step.groups) >= step.closed.num_groups

    def take(self, group: GroupReady) -> None:
        """Mark the group as accumulated, and move to the next position."""
        self._steps[group.step].num_taken = group.position + 1

    def rewind(self) -> None:
        """Return to the first group of the current step."""
        step = self._current()
        if step is not None:
            step.num_taken = 0

    def due(self) -> AgentClosed | None:
        """Return the current step's closing message once all of its groups are taken, else None. Raises LogInvalid if it contradicts them."""
        step = self._current()
        if step is None or step.closed is None or step.num_taken < step.closed.num_groups:
            return None
        self._check_base(step.closed)
        if len(step.groups) > step.closed.num_groups:
            raise LogInvalid(
                f"step {step.closed.step} has {len(step.groups)} groups, closed with {step.closed.num_groups}"
            )
        return step.closed

    def commit(self, step: int, version: int) -> None:
        """Record that the step is committed, and drop its messages. version: after the step; unchanged if it trained no token."""
        self.committed_step = step
        self.version = version
        self._steps = {number: value for number, value in self._steps.items() if number > step}

    def consumed(self) -> tuple[str, ...]:
        """Return the names of the current step's groups taken so far, by position."""
        step = self._current()
        return () if step is None else tuple(step.groups[position].group for position in range(step.num_taken))

    def _current(self) -> _Step | None:
        """Return the step to train now; None if none of its messages has arrived."""
        return None if self.has_gap else self._first()

    def _first(self) -> _Step | None:
        return self._steps[min(self._steps)] if self._steps else None

    def _check_base(self, message: GroupReady | AgentClosed) -> None:
        if message.follows is not None and message.follows != self.committed_step:
            raise LogInvalid(
                f"step {message.step} must be trained after step {message.follows}, and {message.agent} has trained step {self.committed_step}"
            )
        if message.follows is None and message.base_version != self.version:
            raise LogInvalid(
                f"step {message.step} must be trained at version {message.base_version}, and {message.agent} is at version {self.version}"
            )


log = logging.getLogger(__name__)
T = TypeVar("T")

ACK_WAIT_S = 60.0
FETCH_S = 5.0
FETCH_BATCH = 256


class Intake:
    """Reads an agent's messages from its job's log into an inbox, and sets the event `changed` after each message.

    The consumer delivers new messages. Messages that an earlier trainer claimed and did not ack, or that were lost with a
    connection, are also in a replay, so training need not wait for their redelivery.
    """

    def __init__(self, agent: TrainedAgent, inbox: StepInbox, changed: asyncio.Event) -> None:
        self._context, self._timing = agent.shared.context, agent.shared.timing
        self._assignment = agent.assignment
        self._inbox = inbox
        self._changed = changed
        self._unacked: list[tuple[int, Delivery]] = []
        """Deliveries that are not acked yet, each after the number of its step."""
        self._renewed_at = 0.0

    async def replay(self) -> None:
        """Read the whole log up to now into the inbox. Raises LogInvalid."""
        bus = self._context.bus
        stored = await self._patiently(lambda: bus.replay(subjects.GROUPS, self._assignment.log))
        for each in stored:
            message = await self._take(each)
            if message is not None:
                self._inbox.check_replayed(message)

    async def follow(self) -> None:
        """Read new messages into the inbox until cancelled; recreate a consumer that was deleted. Raises LogInvalid, BusRefused."""
        while True:
            consumer = await self._patiently(self._consumer)
            try:
                await self._follow(consumer)
            except BusRefused as error:
                log.warning("%s: %s; recreating the consumer", self._assignment.consumer, error)
                await asyncio.sleep(self._timing.retry_s)

    async def ack(self) -> None:
        """Ack the messages of committed steps. A message whose ack fails is redelivered and acked then."""
        committed = [delivery for step, delivery in self._unacked if step <= self._inbox.committed_step]
        self._unacked = [pair for pair in self._unacked if pair[0] > self._inbox.committed_step]
        with contextlib.suppress(BusUnavailable, BusRefused):
            for delivery in committed:
                await delivery.ack()

    async def _follow(self, consumer: Consumer) -> None:
        while True:
            for delivery in await self._patiently(lambda: consumer.fetch(FETCH_BATCH, FETCH_S)):
                message = await self._take(delivery.stored)
                step = self._inbox.committed_step if message is None else message.step
                self._unacked.append((step, delivery))
            if self._inbox.has_gap:
                await self.replay()
            await self.ack()
            await self._renew()

    async def _consumer(self) -> Consumer:
        spec = self._assignment.document.spec
        most_groups = max(spec.training.groups_per_step, spec.rows_per_step)
        return await self._context.bus.consumer(
            subjects.GROUPS,
            self._assignment.consumer,
            self._assignment.log,
            ack_wait_s=ACK_WAIT_S,
            max_pending=1000 + 4 * (spec.training.max_staleness + 2) * most_groups,
        )

    async def _take(self, stored: Stored) -> GroupReady | AgentClosed | None:
        """Add the agent's part of a message to the inbox and return it.

        Return None for a message of another job of the same name, for a group that is not trained, for the end of a step
        without groups, and for issued tasks and evaluations.
        """
        where = f"message {stored.sequence} of {stored.subject}"
        entry = await wire.unpack(stored.data, self._context.blobs, where)
        if not isinstance(entry, JobLogEntry):
            raise LogInvalid(f"{self._assignment.log} has a message of an unexpected type, {type(entry).__name__}")
        if entry.uid != self._assignment.ref.uid or isinstance(entry, IssueEntry):
            return None
        name = self._assignment.agent.name
        message = next((part for part in entry.parts if part.agent == name), None)
        if not isinstance(message, GroupReady | AgentClosed):
            return None
        if isinstance(message, AgentClosed) and message.num_groups == 0:
            return None
        self._inbox.add(message)
        self._changed.set()
        return message

    async def _renew(self) -> None:
        """Extend the claims on messages whose step is not committed yet."""
        now = asyncio.get_running_loop().time()
        if now - self._renewed_at > ACK_WAIT_S / 3:
            self._renewed_at = now
            with contextlib.suppress(BusUnavailable, BusRefused):
                for _, delivery in list(self._unacked):
                    await delivery.in_progress()

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        return await patiently(call, self._assignment.consumer, self._timing.retry_s)
