"""Cost of the bus gateway against raw nats-py, in one process over an embedded server.

    python -m bench bus [--number N]

Publish: eight concurrent callers that each wait for the ack, and one caller alone. Fetch: batches of 50; every
message is acked and the ack confirmed (`ack_sync`), a batch's acks concurrently. Replay: read a whole subject. Best
of three rounds each, gateway and raw in turn. Prints messages per second and the ratio gateway / raw.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import nats
from nats.js.api import ConsumerConfig

from bench import options
from marlaas_api import subjects
from marlaas_api.bus_nats import NatsBus, connect
from marlaas_api.nats_server import EmbeddedNats

CALLERS = 8
BATCH = 50
ROUNDS = 3
SUBJECT = subjects.episode("bench", "job")


async def publish_all(publish: Callable[[int], Awaitable[object]], number: int, callers: int) -> None:
    async def some(start: int) -> None:
        for index in range(start, number, callers):
            await publish(index)

    await asyncio.gather(*(some(start) for start in range(callers)))


async def timed(work: Awaitable[object], number: int) -> float:
    began = time.perf_counter()
    await work
    return number / (time.perf_counter() - began)


class Gateway:
    """The measured calls through the gateway."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus

    async def publish(self, data: bytes, number: int, callers: int) -> None:
        await publish_all(lambda _: self.bus.publish(SUBJECT, data), number, callers)

    async def fetch(self, name: str, number: int) -> None:
        consumer = await self.bus.consumer(subjects.EPISODES, name, SUBJECT)
        while number > 0:
            batch = await consumer.fetch(BATCH, 5)
            await asyncio.gather(*(delivery.ack() for delivery in batch))
            number -= len(batch)

    async def replay(self, name: str, number: int) -> None:
        assert len(await self.bus.replay(subjects.EPISODES, SUBJECT)) == number


class Raw:
    """The measured calls with nats-py."""

    def __init__(self, client: nats.NATS) -> None:
        self.js = client.jetstream()

    async def publish(self, data: bytes, number: int, callers: int) -> None:
        await publish_all(lambda _: self.js.publish(SUBJECT, data), number, callers)

    async def fetch(self, name: str, number: int) -> None:
        consumer = await self.js.pull_subscribe(SUBJECT, durable=name, stream=subjects.EPISODES)
        while number > 0:
            batch = await consumer.fetch(BATCH, 5)
            await asyncio.gather(*(message.ack_sync(5) for message in batch))
            number -= len(batch)
        await consumer.unsubscribe()

    async def replay(self, name: str, number: int) -> None:
        config = ConsumerConfig(ack_policy="none")
        consumer = await self.js.pull_subscribe(SUBJECT, stream=subjects.EPISODES, config=config)
        while number > 0:
            number -= len(await consumer.fetch(BATCH, 5))
        await consumer.unsubscribe()


async def measure(
    sides: dict[str, Gateway | Raw], bus: NatsBus, data: bytes, number: int
) -> dict[str, dict[str, float]]:
    rates: dict[str, dict[str, float]] = {}

    def note(what: str, side: str, rate: float) -> None:
        row = rates.setdefault(what, {})
        row[side] = max(rate, row.get(side, 0.0))

    for turn in range(ROUNDS):
        for name, side in sides.items():
            await bus.purge(subjects.EPISODES, SUBJECT)
            note(f"publish, {CALLERS} callers", name, await timed(side.publish(data, number, CALLERS), number))
            note(f"fetch({BATCH}) + ack", name, await timed(side.fetch(f"{name}{turn}", number), number))
            note("replay", name, await timed(side.replay(f"{name}{turn}", number), number))
            await bus.delete_consumer(subjects.EPISODES, f"{name}{turn}")
            few = number // 4
            note("publish, 1 caller", name, await timed(side.publish(data, few, 1), few))
    return rates


async def compare(number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedNats(Path(folder)) as server:
            bus, client = await connect(server.url, name="gateway"), await nats.connect(server.url)
            await bus.ensure()
            sides: dict[str, Gateway | Raw] = {"gateway": Gateway(bus), "raw": Raw(client)}
            print(f"{'':28}{'gateway/s':>12}{'nats-py/s':>12}{'ratio':>8}")
            for size, count in ((1024, number), (65536, number // 4)):
                for what, row in (await measure(sides, bus, bytes(size), count)).items():
                    label = f"{size // 1024:3d} KiB {what}"
                    print(f"{label:28}{row['gateway']:12.0f}{row['raw']:12.0f}{row['gateway'] / row['raw']:8.2f}")
            await client.close()
            await bus.close()


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("bus", __doc__)
    parser.add_argument("--number", type=int, default=4000, help="messages per round at 1 KiB; a quarter at 64 KiB")
    asyncio.run(compare(parser.parse_args(arguments).number))
