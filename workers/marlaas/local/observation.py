"""Reads the runner's view of the bus, and writes job documents, its only writes there."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from marlaas_api import subjects
from marlaas_api.bus import Bucket, Bus
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, Progress, ReplicaReport
from marlaas_api.wire import decode_as, encode


@dataclass(frozen=True, slots=True)
class Observation:
    """Progress by job key, and the reports of the live replicas."""

    progress: Mapping[str, Progress] = field(default_factory=dict)
    reports: tuple[ReplicaReport, ...] = ()


async def observe(bus: Bus, keys: Collection[str]) -> Observation:
    """Read the current progress of these jobs and all replica reports. Raises the errors of `Bucket.entries`."""
    entries = await (await bus.bucket(subjects.PROGRESS)).entries()
    reports = await (await bus.bucket(subjects.REPLICAS)).entries()
    return Observation(
        {entry.key: decode_as(Progress, entry.data) for entry in entries if entry.data and entry.key in keys},
        tuple(decode_as(ReplicaReport, entry.data) for entry in reports if entry.data),
    )


async def announce(bus: Bus, documents: Iterable[JobDocument]) -> None:
    """Write the job documents that are missing or changed. Raises InvalidInput if another run's job has the name."""
    bucket = await bus.bucket(subjects.JOBS)
    for document in documents:
        await _announce(bucket, document)


async def _announce(bucket: Bucket, document: JobDocument) -> None:
    entry = await bucket.get(document.ref.key)
    if entry is None or entry.data is None:
        await bucket.create(document.ref.key, encode(document))
        return
    there = decode_as(JobDocument, entry.data)
    if there.uid != document.uid:
        raise InvalidInput(
            f"the NATS server already has a job {document.ref} of another run: "
            "give this one another name or namespace, or go on with that run's --out"
        )
    if there != document:
        await bucket.update(document.ref.key, encode(document), entry.revision)
