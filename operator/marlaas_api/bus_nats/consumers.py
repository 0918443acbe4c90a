"""Durable pull consumers over a `Link`.

A fetch is a request with `no_wait` and `expires`: the server waits for a first message, sends all that are available,
and then marks the end.
"""

import asyncio
import json
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from marlaas_api.bus import BusRefused, BusUnavailable, Delivery, Stored
from marlaas_api.bus_nats.jetstream import API, JetStream
from marlaas_api.bus_nats.layout import nanoseconds
from marlaas_api.bus_nats.link import Link
from marlaas_api.bus_nats.pulls import InboxPool, Pull
from marlaas_api.bus_nats.routes import Incoming, status
from marlaas_api.bus_nats.verdicts import Lost

# _GRACE_S: how long to wait for the end mark after a request has expired. _LINGER_S: how long received messages wait for further ones of
# the same request; its end mark follows at once, unless the consumer's `max_pending` delays the rest.
_GRACE_S = 1.0
_LINGER_S = 0.05
_BACKOFF_S = 0.1
_PASSING = ("Leadership Change", "Server Shutdown", "Exceeded MaxWaiting")


@dataclass(frozen=True, slots=True)
class DeliveryPosition:
    """Stream, consumer and sequence of a claimed message, parsed from its reply subject."""

    stream: str
    consumer: str
    num_delivered: int
    sequence: int

    @classmethod
    def of(cls, message: Incoming) -> Self:
        """Parse `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>...`.

        Newer servers put domain and account before the stream.
        """
        tokens = message.reply.split(".")
        first = 2 if len(tokens) == 9 else 4
        return cls(tokens[first], tokens[first + 1], int(tokens[first + 2]), int(tokens[first + 3]))


@dataclass(frozen=True, slots=True)
class Durable:
    """Identity and ack wait of a consumer.

    inspected: False for users without permission for CONSUMER.INFO; the server is then never asked about the consumer.
    """

    stream: str
    name: str
    ack_wait_s: float
    inspected: bool = True


class NatsConsumer:
    """A durable consumer of one stream."""

    def __init__(self, jetstream: JetStream, link: Link, inboxes: InboxPool, durable: Durable) -> None:
        self._jetstream = jetstream
        self._link = link
        self._stream = durable.stream
        self._name = durable.name
        self._ack_wait_s = durable.ack_wait_s
        self._inspected = durable.inspected
        self._inboxes = inboxes
        self._late: deque[tuple[float, Incoming]] = deque()

    async def fetch(self, batch: int, timeout_s: float) -> list[Delivery]:
        deadline = _now() + timeout_s
        found = self._take_late(batch)
        while not found:
            try:
                found = await self._fetch(batch, max(deadline - _now(), 0.0))
            except BusUnavailable:
                await asyncio.sleep(min(_BACKOFF_S, max(deadline - _now(), 0.0)))
            if _now() >= deadline:
                break
        inspector = self._jetstream if self._inspected else None
        return [NatsDelivery(self._link, inspector, message) for message in found]

    async def _fetch(self, batch: int, expires_s: float) -> list[Incoming]:
        await self._link.ready(_now() + expires_s)
        found: list[Incoming] = []
        pull = await self._inboxes.take(f"{API}.CONSUMER.MSG.NEXT.{self._stream}.{self._name}", found.append)
        try:
            await pull.ask(batch, expires_s, no_wait=True)
            until = _now() + expires_s + _GRACE_S
            while not pull.over and await pull.news(min(until, _now() + _LINGER_S) if found else until):
                pass
        except BaseException:
            await pull.close()
            for message in found:
                await self._link.hand_back(message)
            raise
        if pull.over or found:
            self._inboxes.put(pull, self._keep)
        else:
            await pull.close()
        if not found:
            await self._explain(pull)
        return found

    def _keep(self, message: Incoming) -> None:
        self._late.append((_now(), message))

    def _take_late(self, batch: int) -> list[Incoming]:
        """Return messages that arrived after their fetch had returned, unless their ack wait has passed.

        After the ack wait, the server may have delivered them to another client.
        """
        found: list[Incoming] = []
        while self._late and len(found) < batch:
            arrived, message = self._late.popleft()
            if _now() - arrived < self._ack_wait_s:
                found.append(message)
        return found

    async def _explain(self, pull: Pull) -> None:
        """Raise the reason for which a request ended, unless there were only no messages."""
        if pull.failure is not None:
            raise pull.failure
        code, _, why = (pull.ended or "").partition(" ")
        if code in ("503", "409") and not self._inspected:
            raise BusUnavailable(f"NATS: no server answers for the consumer {self._name} of {self._stream}: {why}")
        if code == "503":
            await self._jetstream.api(f"CONSUMER.INFO.{self._stream}.{self._name}", f"fetch from {self._name}")
        if code == "503" or (code == "409" and any(why.startswith(passing) for passing in _PASSING)):
            raise BusUnavailable(f"NATS: the consumer {self._name} of {self._stream} is not ready: {why}")
        if code == "409":
            raise BusRefused(f"NATS: cannot fetch from the consumer {self._name} of {self._stream}: {why}")


class NatsDelivery:
    """One claimed message. All verbs wait for the server's confirmation; they may reach the server twice.

    A killed server may have lost its last deliveries, and never answers a verb for one of those. Such a message is
    delivered again; until then, settling it raises BusUnavailable. With an `inspector` the error is raised at once,
    because the server can be asked about the consumer; without, at the deadline.
    """

    def __init__(self, link: Link, inspector: JetStream | None, message: Incoming) -> None:
        self._link = link
        self._inspector = inspector
        self._reply = message.reply
        self._num_breaks = link.num_breaks
        self._position = DeliveryPosition.of(message)
        self._stored = Stored(message.subject, self._position.sequence, message.data)

    @property
    def stored(self) -> Stored:
        return self._stored

    @property
    def num_delivered(self) -> int:
        return self._position.num_delivered

    async def ack(self) -> None:
        await self._settle(b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._settle(
            b"-NAK %s" % json.dumps({"delay": nanoseconds(delay_s)}).encode() if delay_s > 0 else b"-NAK"
        )

    async def term(self) -> None:
        await self._settle(b"+TERM")

    async def in_progress(self) -> None:
        await self._settle(b"+WPI")

    async def _settle(self, verb: bytes) -> None:
        deadline = self._link.deadline()
        while True:
            if self._link.num_breaks != self._num_breaks:
                await self._check_remembered()
            with suppress(Lost):
                answer = await self._link.request(self._reply, verb, deadline)
                break
        if status(answer):
            await self._check_remembered()
            raise BusUnavailable(f"NATS: the consumer {self._position.consumer} does not answer")

    async def _check_remembered(self) -> None:
        stream, name, sequence = self._position.stream, self._position.consumer, self._position.sequence
        num_breaks = self._link.num_breaks
        if self._inspector is None:
            return
        info = await self._inspector.api(f"CONSUMER.INFO.{stream}.{name}", f"settle a message of {name}")
        if info["delivered"]["stream_seq"] < sequence:
            raise BusUnavailable(
                f"NATS: the server forgot that {name} claimed message {sequence}; it delivers it again"
            )
        self._num_breaks = num_breaks


def _now() -> float:
    return asyncio.get_running_loop().time()
