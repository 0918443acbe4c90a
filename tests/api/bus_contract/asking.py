"""How the contract asks: nothing waits for ever, and what differs between two answers is not compared.

The fake's time is virtual. A real server's timers are real: tests wait for what they cause, and assert no upper bound.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from marlaas_api.bus import Bus, Consumer, Delivery, Entry
from marlaas_api.subjects import BucketSpec, StreamSpec

T = TypeVar("T")
Connect = Callable[[str], Awaitable[Bus]]

FULL = StreamSpec("FULL", ("full.*",), work_queue=True, max_bytes=4096)
FORGETFUL = StreamSpec("FORGETFUL", ("forgetful.*",), max_bytes=4096, max_message_bytes=2048)
KEEPING = StreamSpec("KEEPING", ("keeping.*",), max_bytes=4096, discard_new=True)
BRIEF = BucketSpec("brief", ttl_s=1.0)


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, 60)


async def take(entries: AsyncIterator[Entry], number: int) -> list[tuple[str, bytes | None]]:
    found = [await soon(anext(entries)) for _ in range(number)]
    return [(entry.key, entry.data) for entry in found]


async def claim(consumer: Consumer) -> Delivery:
    """The next message, whenever it comes."""
    (delivery,) = await soon(consumer.fetch(1, 60))
    return delivery


def contents(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.stored.data for delivery in deliveries]
