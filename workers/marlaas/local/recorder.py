"""Writes episodes from the bus to the jobs' files as they end. For users only; nothing depends on it.

Each job has a durable consumer. An episode is acked after it is on disk, so a killed runner continues where it
stopped. The orchestrator deletes episodes that no recovery needs soon after their step, so the files are complete
only if episodes are read as they end.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from marlaas.episodes.files import DEFAULT_BYTES, EpisodeWriter
from marlaas.episodes.record import EpisodeRecord, joined
from marlaas.local.folder import OutFolder
from marlaas_api import subjects
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus, BusRefused, Consumer, Delivery
from marlaas_api.errors import InvalidInput, Permanent, Retryable
from marlaas_api.messages import Episode, JobDocument, Turn
from marlaas_api.names import JobRef
from marlaas_api.wire import unpack

log = logging.getLogger(__name__)

BATCH = 64
FETCH_S = 0.5
RETRY_S = 1.0


def consumer_name(ref: JobRef) -> str:
    """Return the name of the job's durable consumer."""
    return subjects.consumer(ref.namespace, ref.name, "reader")


@dataclass(slots=True)
class Recorder:
    """Recorder of all jobs of a run. `max_bytes` limits each job's episode files; 0 keeps none."""

    folder: OutFolder
    bus: Bus
    blobs: Blobs
    jobs: Sequence[JobDocument]
    max_bytes: int = DEFAULT_BYTES
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Record until `stop` is called and the stream is empty. Raises InvalidInput if the folder cannot be written."""
        if self.max_bytes <= 0:
            return
        async with asyncio.TaskGroup() as tasks:
            for job in self.jobs:
                tasks.create_task(self._follow(job), name=f"episodes {job.ref}")

    def stop(self) -> None:
        """Let `run` return once no more episodes are there."""
        self._stop.set()

    async def forget(self, finished: Collection[JobRef]) -> None:
        """Delete the consumers of finished jobs. Errors are ignored: a consumer that stays does no harm."""
        for ref in finished:
            with contextlib.suppress(Retryable, BusRefused):
                await self.bus.delete_consumer(subjects.EPISODES, consumer_name(ref))

    async def _follow(self, job: JobDocument) -> None:
        writer = EpisodeWriter(self.folder.job(job.ref), self.max_bytes)
        consumer: Consumer | None = None
        while True:
            stopping = self._stop.is_set()
            try:
                consumer = consumer or await self._consumer(job.ref)
                deliveries = await consumer.fetch(BATCH, FETCH_S)
                await self._keep(job, writer, deliveries)
            except (Retryable, BusRefused) as error:
                log.info("%s: cannot read episodes, retrying: %s", job.ref, error)
                consumer, deliveries = None, []
                await self._pause()
            if stopping and not deliveries:
                return

    async def _consumer(self, ref: JobRef) -> Consumer:
        subject = subjects.episode(ref.namespace, ref.name)
        return await self.bus.consumer(subjects.EPISODES, consumer_name(ref), subject)

    async def _keep(self, job: JobDocument, writer: EpisodeWriter, deliveries: Sequence[Delivery]) -> None:
        records = [await self._read(job, delivery.stored.data) for delivery in deliveries]
        await asyncio.to_thread(writer.append, [record for record in records if record is not None])
        for delivery in deliveries:
            await delivery.ack()

    async def _read(self, job: JobDocument, data: bytes) -> EpisodeRecord | None:
        """Return the episode with its turns; None if it is an earlier job's, or cannot be read."""
        try:
            episode = await unpack(data, self.blobs)
            if not isinstance(episode, Episode) or episode.uid != job.uid:
                return None
            return joined(episode, await self._turns(job.ref, episode.episode))
        except (InvalidInput, BusRefused):
            raise
        except Permanent as error:
            log.warning("%s: skipping an episode that cannot be read: %s", job.ref, error)
            return None

    async def _turns(self, ref: JobRef, episode: str) -> list[Turn]:
        subject = subjects.turn(ref.namespace, ref.name, episode, "*")
        messages = [await unpack(stored.data, self.blobs) for stored in await self.bus.replay(subjects.TURNS, subject)]
        return [message for message in messages if isinstance(message, Turn)]

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(RETRY_S):
                await self._stop.wait()
        except TimeoutError:
            return
