"""How a test follows trainers at work."""

import asyncio
from collections.abc import Callable

from tests.trainer.harness import TrainerHarness

from marlaas_api import subjects, wire
from marlaas_api.messages import JobDocument, ReplicaReport

WITHIN_S = 60.0


async def trained(harness: TrainerHarness, *documents: JobDocument, steps: int = 2) -> list[bytes]:
    """Adapters after some strict steps of jobs that are trained at the same time."""
    for document in documents:
        await harness.admit(document)
    async with harness.trainer(), asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        for document in documents:
            tasks.create_task(harness.play(document, steps))
    return [await harness.adapter(document) for document in documents]


async def report(
    harness: TrainerHarness, condition: Callable[[ReplicaReport], bool], name: str = "trainer-0"
) -> ReplicaReport:
    """Wait for a report."""
    async with (await harness.bus.bucket(subjects.REPLICAS)).watch() as changes:
        async for entry in changes:
            if entry.key == subjects.replica_key("trainer", "tiny", name) and entry.data is not None:
                found = wire.decode_as(ReplicaReport, entry.data)
                if condition(found):
                    return found
    raise AssertionError("the watch ended")


async def let_time_pass(harness: TrainerHarness) -> None:
    """A second of the test's clock for every turn of the loop that a trainer takes."""
    while True:
        harness.clock.at += 1.0
        harness.server.wake()
        await asyncio.sleep(0.001)
