"""The orchestrator's reads and writes on the bus for one job, as typed messages."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from marlaas_api import subjects
from marlaas_api.blobs import BlobRef
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import Bucket, Bus, RevisionConflict, Stored
from marlaas_api.failpoints import failpoint
from marlaas_api.messages import (
    BusMessage,
    Episode,
    EvalRecord,
    GroupLogEntry,
    IssueLedger,
    JobDocument,
    Manifest,
    Pin,
    PolicyRecord,
    ReplicaReport,
    StepRecord,
    TaskMessage,
    Turn,
)
from marlaas_api.names import JobRef
from marlaas_api.wire import decode, decode_as, encode, unpack
from marlaas_worker.job_events import EventEmitter
from marlaas_worker.orchestrator.episodes import read_episode
from marlaas_worker.orchestrator.job_state import History
from marlaas_worker.orchestrator.metering import Metering
from marlaas_worker.orchestrator.room import Room
from marlaas_worker.role import RoleContext


@dataclass(frozen=True, slots=True)
class SharedState:
    """State that the jobs of an orchestrator share.

    Attributes:
        reports: returns the latest reports of all replicas.
        policies: cache of the bucket `policy`.
        room: space in the stream TURNS.
        num_jobs: returns the number of running jobs.
    """

    reports: Callable[[], Sequence[ReplicaReport]]
    policies: BucketCache[PolicyRecord]
    room: Room
    num_jobs: Callable[[], int]


class LostLease(Exception):
    """Another orchestrator has written for this job; this one must stop at once."""


@dataclass(slots=True)
class Records:
    """One job's records. Keeps the sequences and revisions that the next compare-and-set needs."""

    context: RoleContext
    document: JobDocument
    _group_sequence: int = 0
    _logged: deque[tuple[int, int]] = field(default_factory=deque)
    _ledger_revision: int | None = None
    _pins: dict[str, int] = field(default_factory=dict)
    _policy_revision: int = 0
    _metering: Metering | None = None
    _buckets: dict[str, Bucket] = field(default_factory=dict)

    @property
    def bus(self) -> Bus:
        """The bus connection."""
        return self.context.bus

    @property
    def ref(self) -> JobRef:
        """The job's reference."""
        return self.document.ref

    async def _bucket(self, name: str) -> Bucket:
        """Return a bucket that exists; the server is asked only once."""
        if name not in self._buckets:
            self._buckets[name] = await self.bus.bucket(name)
        return self._buckets[name]

    async def history(self, agent: str) -> History:
        """Read all records of the job."""
        self._metering = None
        ref = self.ref
        steps = await self._replay(subjects.STEPS, f"step.{ref.namespace}.{ref.name}.*")
        evals = await self._replay(subjects.STEPS, f"eval.{ref.namespace}.{ref.name}.*")
        groups = await self.bus.replay(subjects.GROUPS, subjects.group(ref.namespace, ref.name, agent))
        self._group_sequence = groups[-1].sequence if groups else 0
        logged = [decode(stored.data) for stored in groups]
        self._logged = deque((m.step, one.sequence) for m, one in zip(logged, groups, strict=True) if _is_of(m, ref))
        return History(
            steps=tuple(sorted((r for r in steps if isinstance(r, StepRecord)), key=lambda record: record.step)),
            evaluations=tuple(record for record in evals if isinstance(record, EvalRecord)),
            groups=tuple(m for m in logged if _is_of(m, ref)),
            ledger=await self._ledger(),
            policy=await self.policy(agent),
        )

    async def episodes(self) -> list[tuple[int, Episode]]:
        """Return all stored episodes with their sequences. Raises EpisodeInvalid."""
        stored = await self.bus.replay(subjects.EPISODES, subjects.episode(self.ref.namespace, self.ref.name))
        read = ((one.sequence, self.episode(one)) for one in stored)
        return [(sequence, episode) for sequence, episode in read if episode is not None]

    def episode(self, stored: Stored) -> Episode | None:
        """Parse an episode; None if it belongs to an earlier job of this name. Raises EpisodeInvalid."""
        return read_episode(stored, self.document)

    async def policy(self, agent: str) -> PolicyRecord:
        """Return the agent's policy record; version -1 while this job has none."""
        bucket = await self._bucket(subjects.POLICY)
        entry = await bucket.get(subjects.policy_key(self.ref.namespace, self.ref.name, agent))
        if entry is None or entry.data is None:
            return PolicyRecord(uid=self.ref.uid)
        self._policy_revision = entry.revision
        record = decode_as(PolicyRecord, entry.data)
        return record if record.uid == self.ref.uid else PolicyRecord(uid=self.ref.uid)

    async def cached_policy(self, agent: str, policies: BucketCache[PolicyRecord]) -> PolicyRecord:
        """Return the agent's policy record from the cache; from the bus if the cache has none, or an older one than it."""
        key = subjects.policy_key(self.ref.namespace, self.ref.name, agent)
        entry, record = policies.entry(key), policies.get(key)
        if entry is None or record is None or entry.revision < self._policy_revision or record.uid != self.ref.uid:
            return await self.policy(agent)
        return record

    async def manifest(self, newest: BlobRef | None, step: int) -> Manifest:
        """Return the manifest of the version that a step produced. newest: the manifest where the search starts."""
        ref = newest
        while ref is not None:
            manifest = decode_as(Manifest, await self.context.blobs.get(ref))
            if manifest.step == step:
                return manifest
            ref = manifest.parent
        raise AssertionError(f"{self.ref}: step {step} is committed, and no manifest of the agent names it")

    async def write_ledger(self, ledger: IssueLedger) -> None:
        """Write the ledger, before the tasks that it names are published. Raises LostLease."""
        bucket = await self._bucket(subjects.LEDGER)
        key = subjects.job_key(self.ref.namespace, self.ref.name)
        try:
            if self._ledger_revision is None:
                self._ledger_revision = await bucket.create(key, encode(ledger))
            else:
                self._ledger_revision = await bucket.update(key, encode(ledger), self._ledger_revision)
        except RevisionConflict as error:
            raise LostLease(f"{self.ref}: another orchestrator wrote the ledger") from error
        failpoint("orchestrator.issue.after_ledger")

    async def log_group(self, message: GroupLogEntry) -> None:
        """Append to the agent's GROUPS subject. Raises LostLease if another orchestrator has appended since our last read."""
        subject = subjects.group(self.ref.namespace, self.ref.name, message.agent)
        try:
            self._group_sequence = await self.bus.publish(subject, encode(message), expect_last=self._group_sequence)
        except RevisionConflict as error:
            raise LostLease(f"{self.ref}: another orchestrator has written to the GROUPS log") from error
        self._logged.append((message.step, self._group_sequence))
        failpoint("orchestrator.assign.after_log")

    async def forget_groups(self, agent: str, step: int) -> None:
        """Purge the decisions of steps up to `step`, which is on record.

        Recovery needs only the step's record and the ledger. The newest message stays: the next compare-and-set
        names its sequence, and an empty subject has none.
        """
        while self._logged and self._logged[0][0] <= step:
            self._logged.popleft()
        first = self._logged[0][1] if self._logged else self._group_sequence
        subject = subjects.group(self.ref.namespace, self.ref.name, agent)
        await self.bus.purge(subjects.GROUPS, subject, up_to=first)
        failpoint("orchestrator.forget.after_groups")

    async def log_step(self, record: StepRecord) -> None:
        """Record a step; does nothing if it is recorded already."""
        subject = subjects.step(self.ref.namespace, self.ref.name, self.ref.uid, record.step)
        await self._once(subject, record)
        failpoint("orchestrator.record.after_step")

    async def log_evaluation(self, record: EvalRecord) -> None:
        """Record an evaluation; does nothing if it is recorded already."""
        await self._once(subjects.evaluation(self.ref.namespace, self.ref.name, self.ref.uid, record.version), record)

    async def queued(self) -> set[str]:
        """Return the groups whose tasks are in the queue: not claimed yet, or being played."""
        stored = await self.bus.replay(subjects.TASKS, subjects.task(self.ref.namespace, self.ref.name))
        tasks = (decode_as(TaskMessage, one.data) for one in stored)
        return {task.group for task in tasks if task.uid == self.ref.uid}

    async def open_tasks(self) -> None:
        """Create the consumer from which the job's sandboxes claim tasks; sandboxes may not create consumers."""
        namespace, job = self.ref.namespace, self.ref.name
        name, subject = subjects.consumer(namespace, job, "sandbox"), subjects.task(namespace, job)
        await self.bus.consumer(subjects.TASKS, name, subject, ack_wait_s=subjects.TASK_ACK_WAIT_S)

    async def publish_task(self, task: TaskMessage) -> None:
        """Queue a task; a duplicate within two minutes changes nothing."""
        subject = subjects.task(self.ref.namespace, self.ref.name)
        await self.bus.publish(subject, encode(task), message_id=task.group)

    async def pin(self, agent: str, group: str, version: int) -> None:
        """Pin a group before a turn of it can be requested; an existing pin stays."""
        bucket = await self._bucket(subjects.PINS)
        key = subjects.pin_key(self.ref.namespace, self.ref.name, agent, group)
        try:
            await bucket.create(key, encode(Pin(version=version)))
            self._pins[group] = version
        except RevisionConflict:
            await self.pinned(agent, group)

    async def pinned(self, agent: str, group: str) -> int | None:
        """Return the version from which a group is sampled; None if it has no pin."""
        if group not in self._pins:
            bucket = await self._bucket(subjects.PINS)
            entry = await bucket.get(subjects.pin_key(self.ref.namespace, self.ref.name, agent, group))
            if entry is None or entry.data is None:
                return None
            self._pins[group] = decode_as(Pin, entry.data).version
        return self._pins[group]

    async def keep_pin(self, agent: str, episode: Episode) -> None:
        """Recreate the pin of an episode's group if it has expired; the version comes from the episode's last turn."""
        if await self.pinned(agent, episode.group) is not None:
            return
        turn = await self.turn(episode.episode, episode.leaves[agent][-1])
        if turn is not None and (turn.agent, turn.group) == (agent, episode.group):
            await self.pin(agent, episode.group, turn.version)

    async def turn(self, episode: str, number: int) -> Turn | None:
        """Return a recorded turn; None if it is not on record."""
        stored = await self.bus.last(subjects.TURNS, subjects.turn(self.ref.namespace, self.ref.name, episode, number))
        if stored is None:
            return None
        message = await unpack(stored.data, self.context.blobs)
        return message if isinstance(message, Turn) else None

    async def conversation(self, episode: str, leaf: int | None) -> list[Turn]:
        """Return the recorded turns of a conversation, oldest first."""
        turns: list[Turn] = []
        while leaf is not None and (turn := await self.turn(episode, leaf)) is not None:
            turns.append(turn)
            leaf = turn.parent
        return turns[::-1]

    def metering(self, agent: str) -> Metering:
        """Return the reader of what an agent's episodes used, a new one after each `history`."""
        self._metering = self._metering or Metering(self.bus, self.context.blobs, self.ref, agent)
        return self._metering

    async def emit(self, reason: str, message: str) -> None:
        """Publish an event of the job."""
        await EventEmitter(self.context, "orchestrator").emit(self.ref, reason, message)

    async def forget_tasks(self) -> None:
        """Purge the queued tasks of a job that is over. Its last episodes stay for readers, until they expire."""
        await self.bus.purge(subjects.TASKS, subjects.task(self.ref.namespace, self.ref.name))

    async def _replay(self, stream: str, subject: str) -> list[BusMessage]:
        stored = await self.bus.replay(stream, subject)
        return [decode(one.data) for one in stored if f".{self.ref.uid}-" in one.subject]

    async def _once(self, subject: str, record: StepRecord | EvalRecord) -> None:
        try:
            await self.bus.publish(subject, encode(record), expect_last=0)
        except RevisionConflict:
            return

    async def _ledger(self) -> IssueLedger | None:
        bucket = await self._bucket(subjects.LEDGER)
        entry = await bucket.get(subjects.job_key(self.ref.namespace, self.ref.name))
        self._ledger_revision = entry.revision if entry is not None and entry.data is not None else None
        if entry is None or entry.data is None:
            return None
        ledger = decode_as(IssueLedger, entry.data)
        return ledger if ledger.uid == self.ref.uid else None


def _is_of(message: BusMessage, ref: JobRef) -> TypeGuard[GroupLogEntry]:
    """Return whether a message of the GROUPS log belongs to this job, not to an earlier one of its name."""
    return isinstance(message, GroupLogEntry) and message.uid == ref.uid
