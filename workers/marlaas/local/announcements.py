"""Announces the jobs of a run on NATS, by their documents, and withdraws cancelled ones."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from marlaas_api import subjects
from marlaas_api.bus import Bucket, Bus
from marlaas_api.errors import InvalidInput, Retryable
from marlaas_api.fenced import FencedKey, Overtaken
from marlaas_api.messages import JobDocument
from marlaas_api.wire import decode_as, encode

RETRY_S = 0.5
_T = TypeVar("_T")


async def write_change(
    bus: Bus, written: Sequence[JobDocument], cancelled: Sequence[JobDocument], stopping: asyncio.Event
) -> tuple[JobDocument, ...]:
    """Announce and withdraw documents as soon as the NATS server answers, unless the run is stopped before.

    Returns:
        The cancelled documents that the server still has. If the run is stopped before, all of them: the next run in the
        folder announces and withdraws the documents of its record.

    Raises:
        InvalidInput: another run's job has one of the names; nothing is written.
    """
    while True:
        try:
            await announce(bus, written)
            return await withdraw(bus, cancelled)
        except Retryable:
            if stopping.is_set():
                return tuple(cancelled)
            await asyncio.sleep(RETRY_S)


async def announce(bus: Bus, documents: Iterable[JobDocument]) -> None:
    """Write the job documents that are missing or changed. Raises InvalidInput if another run's job has one of the names.

    All names are checked before the first write, so that a refused change leaves nothing behind.
    """
    bucket, documents = await bus.bucket(subjects.JOBS), list(documents)
    for document in documents:
        await _read(FencedKey(bucket, document.ref.key), document)
    for document in documents:
        await _until_written(_announce, bucket, document)


async def withdraw(bus: Bus, documents: Iterable[JobDocument]) -> tuple[JobDocument, ...]:
    """Mark the documents of cancelled jobs as deleted. Skip those that are marked, and those whose name a later job has.

    The orchestrator then ends the jobs, deletes what the bus has of them, and last the documents. Returns those that it has
    not deleted yet.
    """
    bucket = await bus.bucket(subjects.JOBS)
    return tuple([document for document in documents if await _until_written(_withdraw, bucket, document)])


async def _until_written(
    write: Callable[[Bucket, JobDocument], Awaitable[_T]], bucket: Bucket, document: JobDocument
) -> _T:
    """Read and write again if another writer was first: the orchestrator deletes the documents of cancelled jobs."""
    while True:
        with suppress(Overtaken):
            return await write(bucket, document)


async def _withdraw(bucket: Bucket, document: JobDocument) -> bool:
    """Mark a document as deleted; return whether the bucket still has it."""
    key = FencedKey(bucket, document.ref.key)
    data = await key.read()
    there = decode_as(JobDocument, data) if data else None
    if there is None or there.uid != document.uid:
        return False
    if not there.deleted:
        marked = there.model_copy(update={"deleted": True, "generation": there.generation + 1})
        await key.write(encode(marked))
    return True


async def _announce(bucket: Bucket, document: JobDocument) -> None:
    key = FencedKey(bucket, document.ref.key)
    if await _read(key, document) != document:
        await key.write(encode(document))


async def _read(key: FencedKey, document: JobDocument) -> JobDocument | None:
    """Return the document in a document's key. Raises InvalidInput if it is another run's."""
    data = await key.read()
    there = decode_as(JobDocument, data) if data else None
    if there is not None and there.uid != document.uid and not there.deleted:
        raise InvalidInput(
            f"the NATS server already has a job {document.ref} of another run: "
            "rename this job or its namespace, or continue that run with its --out"
        )
    return there
