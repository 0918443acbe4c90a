"""The orchestrator's reads and writes on the bus for one job, as typed messages."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeGuard

from marlaas_api import subjects
from marlaas_api.blobs import BlobRef
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import Bucket, Bus, Stored
from marlaas_api.failpoints import failpoint
from marlaas_api.fenced import FencedKey, FencedSubject, Overtaken
from marlaas_api.messages import (
    BusMessage,
    Episode,
    EvalRecord,
    GroupDecided,
    IssueEntry,
    IssueLedger,
    JobDocument,
    JobLogEntry,
    Manifest,
    Pin,
    PolicyRecord,
    ReplicaReport,
    StepClosed,
    StepRecord,
    TaskMessage,
    Turn,
)
from marlaas_api.names import JobRef
from marlaas_api.wire import decode, decode_as, encode, pack, unpack
from marlaas_worker.orchestrator.episodes import read_episode
from marlaas_worker.orchestrator.job_state import JobHistory
from marlaas_worker.orchestrator.steps import Decision
from marlaas_worker.orchestrator.stream_space import StreamSpace
from marlaas_worker.reporter import EventEmitter
from marlaas_worker.role import RoleContext


@dataclass(frozen=True, slots=True)
class SharedState:
    """State that the jobs of an orchestrator share.

    Attributes:
        reports: returns the latest reports of all replicas.
        policies: cache of the bucket `policy`.
        space: shares out the space of the stream TURNS.
        num_jobs: returns the number of running jobs.
        recoveries: limits how many jobs read their stored episodes at once; a page of episodes may take 24 MiB.
    """

    reports: Callable[[], Sequence[ReplicaReport]]
    policies: BucketCache[PolicyRecord]
    space: StreamSpace
    num_jobs: Callable[[], int]
    recoveries: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))


@dataclass(slots=True)
class Records:
    """Reads and writes one job's records on the bus: its log, steps, evaluations, episodes, turns, queued tasks and pins.

    Appending to the job's log fails if another orchestrator has appended since this one has read it.

    A pin is the version of an agent from which a group's turns are sampled. The first pin counts and never changes. Pins of open groups
    are cached.

    Attributes:
        context: of the orchestrator's process.
        document: the job's present document.
        num_preemptions: number of the job's preemptions before its last admission.
    """

    context: RoleContext
    document: JobDocument
    num_preemptions: int = 0
    _log: FencedSubject | None = None
    _decisions: deque[tuple[int, int]] = field(default_factory=deque)
    """Step and sequence of each decision in the log, in its order."""
    _ledger_at: int = 0
    """Sequence of the newest ledger in the log; 0 if there is none."""
    _policy_revisions: dict[str, int] = field(default_factory=dict)
    _buckets: dict[str, Bucket] = field(default_factory=dict)
    _pins: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def bus(self) -> Bus:
        """The bus connection."""
        return self.context.bus

    @property
    def ref(self) -> JobRef:
        """The job's reference."""
        return self.document.ref

    async def _bucket(self, name: str) -> Bucket:
        """Return an existing bucket, by name. Its handle is cached, so that the server is asked for each bucket only once."""
        if name not in self._buckets:
            self._buckets[name] = await self.bus.bucket(name)
        return self._buckets[name]

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the job's agents that have a policy of their own."""
        return tuple(agent.name for agent in self.document.spec.policies)

    async def history(self) -> JobHistory:
        """Read all records of the job.

        The log is read first. If an orchestrator that was replaced appends to it after that, our next append raises Overtaken, and
        everything is read again. If that orchestrator records a step, the log's decisions of the step change nothing.
        """
        ref = self.ref
        log = await self._read_log()
        steps = await self._replay(subjects.STEPS, f"step.{ref.namespace}.{ref.name}.*")
        evals = await self._replay(subjects.STEPS, f"eval.{ref.namespace}.{ref.name}.*")
        if steps and not any(isinstance(entry, IssueEntry) for entry in log):
            raise AssertionError(
                f"{ref}: steps are on record, and the job's log does not say which tasks were issued; a job of an earlier release "
                "cannot go on"
            )
        return JobHistory(
            steps=tuple(sorted((r for r in steps if isinstance(r, StepRecord)), key=lambda record: record.step)),
            evaluations=tuple(record for record in evals if isinstance(record, EvalRecord)),
            log=tuple(log),
            policies={agent: await self.policy(agent) for agent in self.agents},
        )

    async def _read_log(self) -> list[JobLogEntry]:
        """Read the job's log, oldest entry first, without the entries of earlier jobs of this name. `_append` expects that it was read."""
        subject = subjects.job_log(self.ref.namespace, self.ref.name)
        stored = await self.bus.replay(subjects.GROUPS, subject)
        self._log = FencedSubject(self.bus, subject, stored[-1].sequence if stored else 0)
        self._decisions, self._ledger_at = deque(), 0
        read = [(await unpack(one.data, self.context.blobs, _where(one)), one.sequence) for one in stored]
        own = [(entry, sequence) for entry, sequence in read if _is_of(entry, self.ref)]
        for entry, sequence in own:
            self._logged(entry, sequence)
        return [entry for entry, _ in own]

    def _logged(self, entry: JobLogEntry, sequence: int) -> None:
        if isinstance(entry, IssueLedger):
            self._ledger_at = sequence
        elif isinstance(entry, GroupDecided | StepClosed):
            self._decisions.append((entry.step, sequence))

    async def _append(self, entry: JobLogEntry) -> None:
        """Append to the job's log. Raises Overtaken if another orchestrator has appended since our last read."""
        assert self._log is not None, "the history is read first"
        data = await pack(entry, self.context.blobs, self.bus.max_payload_bytes // 2)  # headers count, too
        self._logged(entry, await self._log.append(data))

    async def episodes(self) -> AsyncIterator[tuple[int, Episode]]:
        """Read and parse all stored episodes, page by page, with their sequences. Raises EpisodeInvalid."""
        subject = subjects.episode(self.ref.namespace, self.ref.name)
        async for page in self.bus.pages(subjects.EPISODES, subject):
            for stored in page:
                if (episode := self.episode(stored)) is not None:
                    yield stored.sequence, episode

    def episode(self, stored: Stored) -> Episode | None:
        """Parse an episode; None if it belongs to an earlier job of this name. Raises EpisodeInvalid."""
        return read_episode(stored, self.document)

    async def policy(self, agent: str) -> PolicyRecord:
        """Return the agent's policy record; version -1 while this job has none."""
        bucket = await self._bucket(subjects.POLICY)
        entry = await bucket.get(subjects.policy_key(self.ref.namespace, self.ref.name, agent))
        if entry is None or entry.data is None:
            return PolicyRecord(uid=self.ref.uid)
        self._policy_revisions[agent] = entry.revision
        record = decode_as(PolicyRecord, entry.data, f"the PolicyRecord of key {entry.key}")
        return record if record.uid == self.ref.uid else PolicyRecord(uid=self.ref.uid)

    async def cached_policy(self, agent: str, policies: BucketCache[PolicyRecord]) -> PolicyRecord:
        """Return the agent's policy record from the cache `policies`.

        If the cached record is missing, unreadable, outdated or another job's, read it from the bus.
        """
        key = subjects.policy_key(self.ref.namespace, self.ref.name, agent)
        entry, record = policies.entry(key), policies.get(key)
        read = self._policy_revisions.get(agent, 0)
        if (
            policies.unreadable(key)
            or entry is None
            or record is None
            or entry.revision < read
            or record.uid != self.ref.uid
        ):
            return await self.policy(agent)
        return record

    async def manifest(self, newest: BlobRef | None, step: int) -> Manifest:
        """Return the manifest of the version that a step produced.

        newest: the agent's newest manifest, from which the search goes back to older versions.
        """
        ref = newest
        while ref is not None:
            manifest = decode_as(Manifest, await self.context.blobs.get(ref), ref.name)
            if manifest.step == step:
                return manifest
            ref = manifest.parent
        raise AssertionError(f"{self.ref}: step {step} is committed, and no manifest of the agent names it")

    async def log_issue(self, entry: IssueEntry) -> None:
        """Append an entry about issued tasks or an evaluation to the job's log. Call it before their tasks are published. Raises Overtaken."""
        await self._append(entry)
        failpoint("orchestrator.issue.after_log")

    async def log_decision(self, decision: Decision) -> None:
        """Append the decision about a group, or the decision that a step closes, to the job's log. Raises Overtaken."""
        await self._append(decision)
        failpoint("orchestrator.assign.after_log")

    async def compact(self, ledger: IssueLedger, step: int) -> None:
        """Append the ledger to the log, and purge older entries, but no decision of a step after `step`, and no entry after such a decision.

        step: the last step on record. ledger: the position in the training data, and all that is issued and not on record.

        A restart needs only the records and the remaining entries. If there is no older entry to purge, do nothing. The log keeps at least
        the ledger, because the next compare-and-set names the sequence of the newest entry.
        """
        assert self._log is not None, "the history is read first"
        has_recorded = bool(self._decisions) and self._decisions[0][0] <= step
        if self._log.last == self._ledger_at and not has_recorded:
            return
        await self.log_issue(ledger)
        while self._decisions and self._decisions[0][0] <= step:
            self._decisions.popleft()
        first = min(self._ledger_at, self._decisions[0][1]) if self._decisions else self._ledger_at
        await self.bus.purge(subjects.GROUPS, subjects.job_log(self.ref.namespace, self.ref.name), up_to=first)
        failpoint("orchestrator.purge.after_log")

    async def log_step(self, record: StepRecord) -> None:
        """Record a step; does nothing if it is recorded already."""
        subject = subjects.step(self.ref.namespace, self.ref.name, self.ref.uid, record.step)
        await self._once(subject, record)
        failpoint("orchestrator.record.after_step")

    async def log_evaluation(self, record: EvalRecord) -> None:
        """Record an evaluation; does nothing if it is recorded already."""
        await self._once(subjects.evaluation(self.ref.namespace, self.ref.name, self.ref.uid, record.version), record)

    async def queued(self) -> set[str]:
        """Return the names of the groups whose tasks are in the queue: not claimed yet, or being played.

        Purge from the queue the tasks that were issued before the job's last preemption, because their episodes were cancelled then.
        """
        subject = subjects.task(self.ref.namespace, self.ref.name)
        stored = await self.bus.replay(subjects.TASKS, subject)
        read = [(one.sequence, decode_as(TaskMessage, one.data, _where(one))) for one in stored]
        tasks = [(sequence, task) for sequence, task in read if task.uid == self.ref.uid]
        cut = [sequence for sequence, task in tasks if task.num_preemptions < self.num_preemptions]
        if cut:
            await self.bus.purge(subjects.TASKS, subject, up_to=max(cut) + 1)
        return {task.group for _, task in tasks if task.num_preemptions == self.num_preemptions}

    async def open_tasks(self) -> None:
        """Create the consumer from which the job's sandboxes claim tasks; sandboxes may not create consumers."""
        namespace, job = self.ref.namespace, self.ref.name
        name, subject = subjects.consumer(namespace, job, "sandbox"), subjects.task(namespace, job)
        await self.bus.consumer(subjects.TASKS, name, subject, ack_wait_s=subjects.TASK_ACK_WAIT_S)

    async def publish_task(self, task: TaskMessage, ended: Sequence[int] = ()) -> None:
        """Queue a task; a duplicate within two minutes changes nothing. ended: numbers of its members that have an Episode: they are not played."""
        issued = {"num_preemptions": self.num_preemptions, "ended": tuple(ended)}
        # After a purge the same task needs a new id: a preemption increments num_preemptions, and more steps increment the generation.
        name = f"{task.group}.{self.num_preemptions}.{self.document.generation}"
        subject = subjects.task(self.ref.namespace, self.ref.name)
        await self.bus.publish(subject, encode(task.model_copy(update=issued)), message_id=name)

    async def create_pin(self, agent: str, group: str, version: int) -> None:
        """Pin a group of an agent to a version, unless it has a pin. Call it before a turn of the group can be requested.

        Args:
            agent: name under which the group is pinned (`AgentSettings.pinned_as`).
            group: name of the group.
        """
        key = FencedKey(await self._bucket(subjects.PINS), self._pin_key(agent, group))
        try:
            await key.write(encode(Pin(version=version)))
            self._pins[agent, group] = version
        except Overtaken:
            await self.pin(agent, group)

    async def pin(self, agent: str, group: str) -> int | None:
        """Return the version to which a group is pinned for an agent (`AgentSettings.pinned_as`); None if it has no pin."""
        if (agent, group) not in self._pins:
            entry = await (await self._bucket(subjects.PINS)).get(self._pin_key(agent, group))
            if entry is None or entry.data is None:
                return None
            self._pins[agent, group] = decode_as(Pin, entry.data, f"the Pin of key {entry.key}").version
        return self._pins[agent, group]

    def drop_pins(self, is_open: Callable[[str], bool]) -> None:
        """Remove the pins of groups that are not open from the cache. is_open: returns whether a group, by name, is open."""
        self._pins = {key: version for key, version in self._pins.items() if is_open(key[1])}

    async def restore_pin(self, pinned_as: str, group: str, played: Iterable[tuple[str, Episode]]) -> None:
        """Recreate a group's pin if it has expired, from the oldest version in its turns.

        Args:
            pinned_as: name under which the group is pinned (`AgentSettings.pinned_as`); several agents may share it.
            group: name of the group.
            played: pairs of an agent to which this pin applies, and an episode in which it has turns.
        """
        if await self.pin(pinned_as, group) is not None:
            return
        leaves = [(agent, episode.episode, leaf) for agent, episode in played for leaf in episode.leaves[agent]]
        turns = [(agent, turn) for agent, episode, leaf in leaves for turn in await self.conversation(episode, leaf)]
        own = [turn.version for agent, turn in turns if (turn.agent, turn.group) == (agent, group)]
        if own:
            await self.create_pin(pinned_as, group, min(own))

    async def turn(self, episode: str, number: int) -> Turn | None:
        """Return a recorded turn; None if it is not on record. episode: its name. number: of the turn in the episode."""
        stored = await self.bus.last(subjects.TURNS, subjects.turn(self.ref.namespace, self.ref.name, episode, number))
        if stored is None:
            return None
        message = await unpack(stored.data, self.context.blobs, stored.subject)
        return message if isinstance(message, Turn) else None

    async def conversation(self, episode: str, leaf: int | None) -> list[Turn]:
        """Return the recorded turns of a conversation, oldest first. episode: its name. leaf: number of the last turn; None: no turns."""
        turns: list[Turn] = []
        while leaf is not None and (turn := await self.turn(episode, leaf)) is not None:
            turns.append(turn)
            leaf = turn.parent
        return turns[::-1]

    async def emit(self, reason: str, message: str) -> None:
        """Publish an event of the job. reason: in CamelCase; message: for people."""
        await EventEmitter(self.context, "orchestrator").emit(self.ref, reason, message)

    async def purge_tasks(self) -> None:
        """Purge the queued tasks of the job, which was preempted. Its stored episodes stay."""
        await self.bus.purge(subjects.TASKS, subjects.task(self.ref.namespace, self.ref.name))

    def _pin_key(self, agent: str, group: str) -> str:
        return subjects.pin_key(self.ref.namespace, self.ref.name, agent, group)

    async def _replay(self, stream: str, subject: str) -> list[BusMessage]:
        stored = await self.bus.replay(stream, subject)
        return [decode(one.data, _where(one)) for one in stored if f".{self.ref.uid}-" in one.subject]

    async def _once(self, subject: str, record: StepRecord | EvalRecord) -> None:
        with suppress(Overtaken):
            await FencedSubject(self.bus, subject).append(encode(record))


def _where(stored: Stored) -> str:
    return f"message {stored.sequence} of {stored.subject}"


def _is_of(message: BusMessage, ref: JobRef) -> TypeGuard[JobLogEntry]:
    """Return whether a message is a log entry of this job, and not of an earlier job of the same name."""
    return isinstance(message, JobLogEntry) and message.uid == ref.uid
