"""Durable consumers of the bus fake."""

import asyncio

from marlaas_api.bus import BusUnavailable, Delivery, Stored
from marlaas_api.bus_memory.server import Gate, SharedServer
from marlaas_api.bus_memory.stream import Kept


class MemoryConsumer:
    """A durable consumer. inspected: False if the consumer may not exist yet."""

    def __init__(self, gate: Gate, server: SharedServer, stream: str, name: str, *, inspected: bool = True) -> None:
        self._gate = gate
        self._server = server
        self._stream = stream
        self._name = name
        self._inspected = inspected

    async def fetch(self, batch: int, timeout_s: float) -> list[Delivery]:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            claimed = await self._claim(batch)
            left_s = deadline - asyncio.get_running_loop().time()
            if claimed or left_s <= 0:
                return [MemoryDelivery(self, *found) for found in claimed]
            await self._server.change(left_s, self._server.streams[self._stream].next_due(self._name), self._stream)

    async def settle(self, sequence: int) -> None:
        """Ack or term a message."""
        await self._gate()
        self._server.stream(self._stream).settle(self._name, sequence)
        self._server.wake(self._stream)

    async def postpone(self, sequence: int, delay_s: float | None) -> None:
        """Deliver a message again after `delay_s` (None: the ack wait)."""
        await self._gate()
        self._server.stream(self._stream).postpone(self._name, sequence, self._server.clock(), delay_s)
        self._server.wake(self._stream)

    async def _claim(self, batch: int) -> list[tuple[Kept, int]]:
        try:
            await self._gate()
        except BusUnavailable:
            return []
        stream = self._server.stream(self._stream)
        if not self._inspected and self._name not in stream.consumers:
            return []
        return stream.claim(self._name, batch, self._server.clock())


class MemoryDelivery:
    """One claimed message."""

    def __init__(self, consumer: MemoryConsumer, kept: Kept, num_delivered: int) -> None:
        self._consumer = consumer
        self._stored = kept.stored
        self._num_delivered = num_delivered

    @property
    def stored(self) -> Stored:
        return self._stored

    @property
    def num_delivered(self) -> int:
        return self._num_delivered

    async def ack(self) -> None:
        await self._consumer.settle(self._stored.sequence)

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._consumer.postpone(self._stored.sequence, delay_s)

    async def term(self) -> None:
        await self._consumer.settle(self._stored.sequence)

    async def in_progress(self) -> None:
        await self._consumer.postpone(self._stored.sequence, None)
