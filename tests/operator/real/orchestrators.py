"""A scripted orchestrator: admits what a test says, and forgets deleted jobs as the real one does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from marlaas_api import subjects
from marlaas_api.bus import Bucket, Bus, Entry, RevisionConflict
from marlaas_api.errors import Retryable
from marlaas_api.messages import JobDocument, Phase, Progress
from marlaas_api.wire import decode_as, encode
from marlaas_operator.bus_health import LEADER

QUEUED = {"phase": Phase.QUEUED, "admitted": False, "reason": "WaitingForPool", "message": "no replica is ready"}
ADMITTED = {"phase": Phase.RUNNING, "admitted": True, "reason": "Admitted", "message": "admitted"}
SUSPENDED = {"phase": Phase.SUSPENDED, "admitted": False, "reason": "Suspended", "message": "spec.suspend is true"}
SUCCEEDED = {"phase": Phase.SUCCEEDED, "admitted": False, "reason": "Finished", "message": "done", "step": 4}


class ScriptedOrchestrator:
    """Says Queued of every document it meets, until a test says otherwise. documents: what was seen, by key."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.documents: dict[str, JobDocument] = {}
        self.forgets = True

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["ScriptedOrchestrator"]:
        tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._lead())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def say(self, namespace: str, name: str, **words: object) -> Progress:
        """Write the progress of a job, of the document that is there."""
        key = subjects.job_key(namespace, name)
        entry = await (await self._bus.bucket(subjects.JOBS)).get(key)
        assert entry is not None
        assert entry.data is not None
        document = decode_as(JobDocument, entry.data)
        progress = _progress(document, words)
        await (await self._bus.bucket(subjects.PROGRESS)).put(key, encode(progress))
        return progress

    async def forget(self, key: str) -> None:
        """What the real one does with a deleted document in the end: progress goes first, the document last."""
        jobs = await self._bus.bucket(subjects.JOBS)
        entry = await jobs.get(key)
        if entry is not None:
            await (await self._bus.bucket(subjects.PROGRESS)).delete(key)
            with contextlib.suppress(RevisionConflict):
                await jobs.delete(key, entry.revision)

    async def _lead(self) -> None:
        while True:
            with contextlib.suppress(Retryable):
                await (await self._bus.bucket(subjects.REPLICAS)).put(LEADER, b"scripted")
            await asyncio.sleep(2.0)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(Retryable):
                jobs = await self._bus.bucket(subjects.JOBS)
                async with jobs.watch() as entries:
                    async for entry in entries:
                        await self._take(jobs, entry)
            await asyncio.sleep(0.2)

    async def _take(self, jobs: Bucket, entry: Entry) -> None:
        if entry.data is None:
            self.documents.pop(entry.key, None)
            return
        document = decode_as(JobDocument, entry.data)
        known = self.documents.get(entry.key)
        self.documents[entry.key] = document
        if document.deleted and self.forgets:
            await self.forget(entry.key)
        elif known is None or known.uid != document.uid:
            await self._first_word(entry.key, document)

    async def _first_word(self, key: str, document: JobDocument) -> None:
        """Unless a test has spoken of the job already: what it said stays."""
        progress = await self._bus.bucket(subjects.PROGRESS)
        there = await progress.get(key)
        if there is not None and there.data is not None and decode_as(Progress, there.data).uid == document.uid:
            return
        data = encode(_progress(document, QUEUED))
        with contextlib.suppress(RevisionConflict):
            await (progress.create(key, data) if there is None else progress.update(key, data, there.revision))


def _progress(document: JobDocument, words: Mapping[str, object]) -> Progress:
    names = document.model_dump(include={"namespace", "job", "uid", "generation"})
    return Progress.model_validate({**names, "steps": document.spec.training.steps, **words})
