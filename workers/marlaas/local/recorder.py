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
from marlaas_api.errors import InvalidInput, MarlaasError, Permanent, Retryable, Unreadable
from marlaas_api.messages import Episode, JobDocument, Turn
from marlaas_api.names import JobRef, is_score
from marlaas_api.wire import unpack

log = logging.getLogger(__name__)

BATCH = 64
FETCH_S = 0.2
GATHER_S = 3.0
"""Pause after a fetch that was not full. The next one gets the episodes of seconds at once, and each fetch has a cost."""
RETRY_S = 1.0
LAST_S = 40.0
"""Seconds after `stop` in which episodes are read that a killed recorder had claimed: they come again after 30 s."""
MAX_KEPT_BYTES = 16 << 20


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
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _followed: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _unread: set[str] = field(default_factory=set)
    _last_s: float = 0.0

    async def run(self) -> None:
        """Record until `stop` is called and all stored episodes are read, at most LAST_S later. Raises InvalidInput if the folder cannot be written."""
        if self.max_bytes <= 0:
            return
        async with asyncio.TaskGroup() as tasks:
            self._reconcile(tasks)
            while not self._stop.is_set():
                await self._changed.wait()
                self._changed.clear()
                self._reconcile(tasks)

    def replace(self, jobs: Sequence[JobDocument]) -> None:
        """Record these jobs from now on, and no others."""
        self.jobs = jobs
        self._changed.set()

    def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        """Follow the jobs of the run, which change, and no others."""
        now = {job.uid: job for job in self.jobs}
        for uid in self._followed.keys() - now.keys():
            self._followed.pop(uid).cancel()
        for uid in now.keys() - self._followed.keys():
            self._followed[uid] = tasks.create_task(self._follow(now[uid]), name=f"episodes {now[uid].ref}")

    def stop(self, *, at_once: bool = False) -> None:
        """Let `run` return once no more episodes are there. at_once: do not wait for episodes that cannot be read now."""
        self._last_s = 0.0 if at_once else LAST_S
        self._stop.set()
        self._changed.set()

    async def forget(self, finished: Collection[JobRef]) -> None:
        """Delete the consumers of finished jobs whose episodes are all read.

        Errors are ignored: a consumer that stays does no harm.
        """
        for ref in finished:
            if ref.uid in self._unread:
                continue
            with contextlib.suppress(Retryable, BusRefused):
                await self.bus.delete_consumer(subjects.EPISODES, consumer_name(ref))

    async def _follow(self, job: JobDocument) -> None:
        writer = EpisodeWriter(self.folder.job(job.ref), self.max_bytes)
        turns = TurnReader(self.bus, self.blobs, job.ref)
        consumer: Consumer | None = None
        now = asyncio.get_running_loop().time
        stopped_at: float | None = None
        while True:
            if stopped_at is None and self._stop.is_set():
                stopped_at = now()
            try:
                consumer = consumer or await self._consumer(job.ref)
                deliveries = await consumer.fetch(BATCH, FETCH_S)
                await self._keep(job, writer, deliveries, turns)
            except (Retryable, BusRefused) as error:
                log.info("%s: cannot read episodes, retrying: %s", job.ref, error)
                consumer, deliveries = None, []
                await self._pause(RETRY_S)
            if stopped_at is not None and not deliveries:
                if await self._has_read_all(job.ref):
                    return
                if now() - stopped_at >= self._last_s:
                    log.warning("%s: some of its last episodes were not read and are missing from its files", job.ref)
                    self._unread.add(job.uid)
                    return
                await asyncio.sleep(FETCH_S)
            if len(deliveries) < BATCH:
                await self._pause(GATHER_S)

    async def _has_read_all(self, ref: JobRef) -> bool:
        try:
            position = await self.bus.position(subjects.EPISODES, consumer_name(ref))
        except (Retryable, BusRefused):
            return False
        return position is None or position.num_behind == 0

    async def _consumer(self, ref: JobRef) -> Consumer:
        subject = subjects.episode(ref.namespace, ref.name)
        return await self.bus.consumer(subjects.EPISODES, consumer_name(ref), subject)

    async def _keep(
        self, job: JobDocument, writer: EpisodeWriter, deliveries: Sequence[Delivery], turns: "TurnReader"
    ) -> None:
        found = [await self._read(job, delivery.stored.data) for delivery in deliveries]
        episodes = [episode for episode in found if episode is not None]
        if episodes:
            await turns.read_new()
        records = [await self._joined(job, episode, turns) for episode in episodes]
        await asyncio.to_thread(writer.append, [record for record in records if record is not None])
        for delivery in deliveries:
            await delivery.ack()

    async def _read(self, job: JobDocument, data: bytes) -> Episode | None:
        """Return the episode; None if it is an earlier job's, or cannot be read."""
        try:
            episode = await unpack(data, self.blobs)
        except (InvalidInput, BusRefused):
            raise
        except (Permanent, Unreadable) as error:
            _log_unreadable(job, error)
            return None
        return episode if isinstance(episode, Episode) and episode.uid == job.uid else None

    async def _joined(self, job: JobDocument, episode: Episode, turns: "TurnReader") -> EpisodeRecord | None:
        """Return the episode with its turns; None if they cannot be read."""
        try:
            return joined(episode, await turns.of(episode))
        except (InvalidInput, BusRefused):
            raise
        except (Permanent, Unreadable) as error:
            _log_unreadable(job, error)
            return None

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()


def _log_unreadable(job: JobDocument, error: MarlaasError) -> None:
    log.warning("%s: skipping an episode that cannot be read: %s", job.ref, error)


@dataclass(slots=True)
class TurnReader:
    """Reads the turns of one job, each once and many at a time, and keeps those of episodes that have not ended.

    Plays that are given up leave turns without an episode, so the oldest are dropped beyond `MAX_KEPT_BYTES`. Turns
    that are missing here are read again for their episode.
    """

    bus: Bus
    blobs: Blobs
    ref: JobRef
    next_sequence: int = 1
    _kept: dict[str, list[bytes]] = field(default_factory=dict)
    _kept_bytes: int = 0

    async def read_new(self) -> None:
        """Read the turns since the last call. Raises the errors of `Bus.pages`."""
        subject = subjects.turn(self.ref.namespace, self.ref.name, "*", "*")
        async for page in self.bus.pages(subjects.TURNS, subject, self.next_sequence):
            for stored in page:
                *_, episode, number = stored.subject.split(".")
                if not is_score(int(number)):
                    self._kept.setdefault(episode, []).append(stored.data)
                    self._kept_bytes += len(stored.data)
                self.next_sequence = max(self.next_sequence, stored.sequence + 1)
            while self._kept_bytes > MAX_KEPT_BYTES:
                self._take(next(iter(self._kept)))

    async def of(self, episode: Episode) -> list[Turn]:
        """Return the turns of an ended episode, which are then forgotten. Raises Permanent, and errors of the bus and the store."""
        kept = self._take(episode.episode)
        if len(kept) != episode.num_turns:
            subject = subjects.turn(self.ref.namespace, self.ref.name, episode.episode, "*")
            kept = [stored.data for stored in await self.bus.replay(subjects.TURNS, subject)]
        messages = [await unpack(data, self.blobs) for data in kept]
        return [message for message in messages if isinstance(message, Turn) and message.scores is None]

    def _take(self, episode: str) -> list[bytes]:
        kept = self._kept.pop(episode, [])
        self._kept_bytes -= sum(map(len, kept))
        return kept
