"""An orchestrator that is started again when it dies, on a bus and a blob store, and jobs to delete there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tests.orchestrator.harness import Killed
from tests.orchestrator.remains import all_there_is, document_of

from marlaas_api import subjects
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_api.messages import JobDocument, Progress
from marlaas_api.wire import decode_as, encode
from marlaas_worker.orchestrator import service
from marlaas_worker.role import RoleContext


class Place:
    """A bus and a blob store, and an orchestrator on them that is started again when it dies."""

    def __init__(self, dial: Callable[[str], Any], blobs: Blobs, scratch: Path) -> None:
        self.dial, self.blobs, self.scratch = dial, blobs, scratch
        self.bus: Bus
        self.deaths = 0

    async def put(self, document: JobDocument) -> None:
        await (await self.bus.bucket(subjects.JOBS)).put(document.ref.key, encode(document))

    async def all_there_is(self) -> set[str]:
        return await all_there_is(self.bus, self.blobs)

    async def level(self, document: JobDocument) -> Progress | None:
        entry = await (await self.bus.bucket(subjects.PROGRESS)).get(document.ref.key)
        return None if entry is None else decode_as(Progress, entry.data or b"")

    async def _orchestrate(self) -> None:
        while True:
            bus = await self.dial("orchestrator")
            try:
                await service.serve(RoleContext("orchestrator", bus, self.blobs, self.scratch))
            except* Killed:
                self.deaths += 1
            finally:
                await bus.close()

    @contextlib.asynccontextmanager
    async def orchestrating(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._orchestrate())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def until(self, what: Callable[[], Any]) -> None:
        async with asyncio.timeout(40):
            while not await what():  # noqa: ASYNC110 - of a bus, nobody tells
                await asyncio.sleep(0.05)

    async def is_forgotten(self, document: JobDocument) -> None:
        async def gone() -> bool:
            return await document_of(self.bus, document) is None

        await self.until(gone)


def doomed(document: Callable[..., JobDocument], retention: str = "delete") -> JobDocument:
    job = document()
    spec = job.spec.model_copy(update={"adapter_retention": retention})
    return job.model_copy(update={"deleted": True, "spec": spec})


def neighbours(document: Callable[..., JobDocument]) -> list[JobDocument]:
    """Jobs whose names begin alike; suspended, so that the orchestrator leaves them alone."""
    return [
        document("sums-2", suspend=True),
        document("sum", suspend=True),
        document(suspend=True).model_copy(update={"namespace": "team-a-2"}),
    ]
