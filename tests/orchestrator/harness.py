"""Everybody around the orchestrator, over the bus fake: a hand-written sandbox and trainer that do just what the messages say."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from marlaas_api import subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import BusUnavailable, RevisionConflict
from marlaas_api.bus_memory import MemoryBus, MemoryServer
from marlaas_api.messages import (
    Episode,
    FaultClass,
    GroupReady,
    JobDocument,
    Manifest,
    Meter,
    PolicyRecord,
    Progress,
    ReplicaReport,
    StepClosed,
    StepRecord,
    StopReason,
    TaskMessage,
    Turn,
)
from marlaas_api.names import AdapterRef, episode_id
from marlaas_api.wire import decode, decode_as, encode
from marlaas_worker.orchestrator import service
from marlaas_worker.role import RoleContext

ADMITTED = "orchestrator.admit.after_level"
"""Passed once in a job's life; the other seams again and again."""
SEAMS = (
    ADMITTED,
    "orchestrator.issue.after_ledger",
    "orchestrator.issue.after_task",
    "orchestrator.assign.after_log",
    "orchestrator.record.after_step",
    "orchestrator.forget.after_groups",
    "orchestrator.forget.after_turns",
)

Rewards = Callable[[TaskMessage, int], float | None]


class Killed(BaseException):
    """The orchestrator died at a failpoint."""


class FlakyBus(MemoryBus):
    """A connection that refuses every so many calls, if its stage says so."""

    harness: "OrchestratorHarness"

    async def check(self, subject: str = "x", data: bytes = b"") -> None:
        await super().check(subject, data)
        self.harness.calls += 1
        if self.harness.refuse_every and self.harness.calls % self.harness.refuse_every == 0:
            self.harness.refused += 1
            raise BusUnavailable("not now")


def a_turn(job: str, uid: str, group: str, member: int, *, version: int = 0, prompt_ids: bytes = b"") -> Turn:
    """The first turn of a member's first episode."""
    return Turn(
        namespace="team-a",
        job=job,
        uid=uid,
        agent="policy",
        group=group,
        member=member,
        episode=episode_id(group, member, 1),
        turn=0,
        parent=None,
        version=version,
        adapter_sha256="",
        opens_segment=True,
        append="",
        prompt_ids=prompt_ids,
        output_ids=b"",
        logprobs=b"",
        text="",
        stop_reason=StopReason.STOP,
        temperature=1.0,
        meter=Meter(prompt_tokens=0, output_tokens=0),
        replica="r",
        at=0.0,
    )


class OrchestratorHarness:
    """One bus, and everybody around the orchestrator."""

    calls = refuse_every = refused = 0
    turn_bytes = 0
    """Of the one turn that each episode has; 0: there are no turns."""

    def __init__(self, scratch: Path) -> None:
        self.server = MemoryServer()
        self.bus = self.server.connect("stage")
        self.blobs = MemoryBlobs()
        self.scratch = scratch
        self.trained: list[tuple[int, tuple[str, ...]]] = []
        self.may_train = asyncio.Event()
        self.may_train.set()
        self.deaths = 0
        self.metrics = {"loss": 0.5}

    def context(self, name: str) -> RoleContext:
        bus = FlakyBus(self.server, name)
        bus.harness = self
        return RoleContext(name, bus, self.blobs, self.scratch)

    async def submit(self, document: JobDocument) -> None:
        bucket = await self.bus.bucket(subjects.JOBS)
        await bucket.put(document.ref.key, encode(document))

    async def report(self, document: JobDocument, version: int) -> None:
        names = tuple(
            AdapterRef("team-a", document.job, document.uid, "policy", v).engine_name for v in range(version + 1)
        )
        report = ReplicaReport(role="rollout", pool="tiny", replica="rollout-0", slots=8, max_rank=16, verified=names)
        await (await self.bus.bucket(subjects.REPLICAS)).put(
            subjects.replica_key("rollout", "tiny", "rollout-0"), encode(report)
        )

    async def orchestrate(self) -> None:
        """Run the orchestrator; a killed one is started again under the same name."""
        while True:
            try:
                await service.serve(self.context("orchestrator"))
            except* Killed:
                self.deaths += 1

    async def play(self, document: JobDocument, rewards: Rewards) -> None:
        bus = self.server.connect("sandbox")
        name = subjects.consumer("team-a", document.job, "sandbox")
        consumer = await bus.consumer(subjects.TASKS, name, subjects.task("team-a", document.job))
        while True:
            for delivery in await consumer.fetch(8, 1.0):
                task = decode_as(TaskMessage, delivery.stored.data)
                for member in range(task.group_size):
                    reward = rewards(task, member)
                    if self.turn_bytes:
                        await self.record_turn(task, episode_id(task.group, member, 1))
                    episode = Episode(
                        namespace=task.namespace,
                        job=task.job,
                        uid=task.uid,
                        group=task.group,
                        split=task.split,
                        index=task.index,
                        member=member,
                        episode=episode_id(task.group, member, 1),
                        fault=FaultClass.ENV if reward is None else None,
                        fault_text="ZeroDivisionError: in play" if reward is None else "",
                        rewards={} if reward is None else {"policy": reward},
                        leaves={"policy": (0,)} if self.turn_bytes and reward is not None else {},
                    )
                    await bus.publish(subjects.episode("team-a", task.job), encode(episode))
                await delivery.ack()

    async def record_turn(self, task: TaskMessage, episode: str) -> None:
        """As the rollout role does: the first record counts, and a full stream is waited for."""
        member = int(episode.split("-")[-2])
        turn = a_turn(task.job, task.uid, task.group, member, prompt_ids=bytes(self.turn_bytes))
        subject = subjects.turn("team-a", task.job, episode, 0)
        while True:
            try:
                await self.bus.publish(subject, encode(turn), expect_last=0)
            except RevisionConflict:
                return
            except BusUnavailable:
                await asyncio.sleep(0.01)
            else:
                return

    async def read_turns(self, group: GroupReady) -> None:
        """As the trainer does."""
        for trajectory in group.trajectories:
            for leaf in trajectory.leaves:
                subject = subjects.turn("team-a", group.job, trajectory.episode, leaf)
                assert await self.bus.last(subjects.TURNS, subject) is not None, f"{subject} is lost"

    async def commit(
        self, document: JobDocument, record: PolicyRecord, closed: StepClosed | None, names: tuple[str, ...]
    ) -> PolicyRecord:
        version = record.version + 1
        manifest = Manifest(
            namespace="team-a",
            job=document.job,
            uid=document.uid,
            agent="policy",
            version=version,
            step=closed.step if closed else -1,
            parent=record.manifest,
            rank=8,
            files={},
            state=None,
            tensor_digests={},
            probes=(),
            consumed=names,
            metrics=self.metrics,
        )
        ref = await self.blobs.put("team-a/manifests", "manifest", encode(manifest))
        fresh = PolicyRecord(
            uid=document.uid, version=version, manifest=ref, step=manifest.step, epoch=1, holder="t", train_s=1.5
        )
        await (await self.bus.bucket(subjects.POLICY)).put(
            subjects.policy_key("team-a", document.job, "policy"), encode(fresh)
        )
        await self.report(document, version)
        return fresh

    async def train(self, document: JobDocument, may_train: asyncio.Event | None = None) -> None:
        record = await self.commit(document, PolicyRecord(uid=document.uid), None, ())
        bus = self.server.connect("trainer")
        name, subject = f"trainer-{document.job}", subjects.group("team-a", document.job, "policy")
        consumer = await bus.consumer(subjects.GROUPS, name, subject)
        ready: dict[int, list[GroupReady]] = {}
        while True:
            for delivery in await consumer.fetch(8, 1.0):
                message = decode(delivery.stored.data)
                await delivery.ack()
                if isinstance(message, GroupReady):
                    groups = ready.setdefault(message.step, [])
                    assert message.position == len(groups), "positions are dense and in order"
                    groups.append(message)
                elif isinstance(message, StepClosed) and message.num_groups:
                    await (may_train or self.may_train).wait()
                    groups = ready.pop(message.step)
                    assert message.num_groups == len(groups)
                    assert message.base_version == record.version
                    for group in groups:
                        await self.read_turns(group)
                    names = tuple(group.group for group in groups)
                    self.trained.append((message.step, names))
                    record = await self.commit(document, record, message, names)

    async def progress(self, document: JobDocument, until: Callable[[Progress], bool]) -> Progress:
        async with asyncio.timeout(30), (await self.bus.bucket(subjects.PROGRESS)).watch() as entries:
            async for entry in entries:
                if entry.key != document.ref.key or not entry.data:
                    continue
                if until(level := decode_as(Progress, entry.data)) and level.uid == document.uid:
                    return level
        raise AssertionError("the watch ended")

    async def steps(self, document: JobDocument) -> list[StepRecord]:
        stored = await self.bus.replay(subjects.STEPS, f"step.team-a.{document.job}.*")
        return [decode_as(StepRecord, one.data) for one in stored]


@contextlib.asynccontextmanager
async def running(harness: OrchestratorHarness, document: JobDocument, rewards: Rewards) -> AsyncIterator[None]:
    await harness.report(document, -1)
    await harness.submit(document)
    tasks = [
        asyncio.create_task(one)
        for one in (harness.orchestrate(), harness.play(document, rewards), harness.train(document))
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result


def final(level: Progress) -> bool:
    return level.phase.final


def mixed(task: TaskMessage, member: int) -> float:
    return float(member == 0)
