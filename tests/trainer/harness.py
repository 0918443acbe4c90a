"""Harness for trainers: bus, blobs and a clock in memory, with the orchestrator's, the rollout role's and the sandbox's part of the loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load
from tests.trainer.jobs import assignment_of
from tests.trainer.sampler import VOCABULARY, Sampler
from torch import Tensor

from marlaas_api import subjects, wire
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.documents import pool_spec
from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages import (
    GroupLogEntry,
    GroupReady,
    JobDocument,
    JobEvent,
    Manifest,
    Meter,
    Phase,
    PolicyRecord,
    PoolDocument,
    Progress,
    StepClosed,
    StopReason,
    TrajectoryRef,
    Turn,
)
from marlaas_api.names import derive_seed, episode_id, train_group
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.metrics import Metrics
from marlaas_worker.role import RoleContext
from marlaas_worker.trainer import service
from marlaas_worker.trainer.agent import weighing
from marlaas_worker.trainer.rows import Segment
from marlaas_worker.trainer.shared import Timing
from marlaas_worker.trainer.trajectories import Expectation, read_group

QUICK = Timing(report_s=0.02, reconcile_s=0.02, retry_s=0.005, missing_turn_s=5.0, fault_s=1e6)


class Killed(BaseException):
    """The trainer is killed at this point, as by kill -9."""


@dataclass
class Clock:
    """Seconds that pass only when a test says so."""

    at: float = 1000.0

    def __call__(self) -> float:
        return self.at


@dataclass
class TrainerHarness:
    """Bus and blobs, and the parts of orchestrator, rollout and sandbox."""

    model: Path
    scratch: Path
    sampler: Sampler
    clock: Clock = field(default_factory=Clock)
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)
    tamper: Callable[[Turn], Turn | None] = lambda turn: turn

    def __post_init__(self) -> None:
        self.server = MemoryServer(self.clock)
        self.bus = self.server.connect("test")
        self.metrics: dict[str, Metrics] = {}

    @property
    def pool(self) -> PoolDocument:
        """The pool that the trainers are of."""
        spec = pool_spec(ModelPoolSpec.model_validate({"model": {"path": str(self.model)}, "trainer": {"threads": 1}}))
        return PoolDocument(name="tiny", model_path=str(self.model), spec=spec)

    # a trainer ------------------------------------------------------------------------------------------------------

    async def serve(self, name: str, stop: asyncio.Event, blobs: MemoryBlobs | None = None) -> None:
        """Run a trainer once, until `stop` is set."""
        bus = self.server.connect(name)
        context = RoleContext(name, bus, blobs or self.blobs, self.scratch, stop, self.clock)
        self.metrics[name] = context.metrics
        try:
            await service.serve(context, self.pool, QUICK)
        finally:
            await bus.close()

    @contextlib.asynccontextmanager
    async def trainer(self, name: str = "trainer-0") -> AsyncIterator[asyncio.Task[None]]:
        """A trainer, restarted under its name whenever it is killed, and drained at the end."""
        stop = asyncio.Event()
        task = asyncio.create_task(self._supervise(name, stop))
        try:
            yield task
        finally:
            stop.set()
            await task

    async def _supervise(self, name: str, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                await self.serve(name, stop)
            except* Killed:
                pass

    # the orchestrator -----------------------------------------------------------------------------------------------

    async def admit(self, document: JobDocument, **changes: Any) -> None:
        """Write a job's document and progress."""
        key = subjects.job_key(document.namespace, document.job)
        progress = Progress(
            namespace=document.namespace,
            job=document.job,
            uid=document.uid,
            phase=Phase.RUNNING,
            admitted=True,
            reason="Admitted",
            steps=document.spec.training.steps,
        )
        await (await self.bus.bucket(subjects.JOBS)).put(key, wire.encode(document))
        await (await self.bus.bucket(subjects.PROGRESS)).put(key, wire.encode(progress.model_copy(update=changes)))

    async def assign(self, document: JobDocument, step: int, positions: Sequence[int], **changes: Any) -> None:
        """Log groups of a step, their turns being recorded."""
        record = await self.record(document)
        for position in positions:
            group = await self._group(document, step, position, record)
            await self.log(document, group.model_copy(update=changes))

    async def close(self, document: JobDocument, step: int, num_groups: int, base_version: int | None = None) -> None:
        """Log that a step has all its groups."""
        base = (await self.record(document)).version if base_version is None else base_version
        ids = {"namespace": document.namespace, "job": document.job, "uid": document.uid}
        await self.log(document, StepClosed(**ids, agent="policy", step=step, base_version=base, num_groups=num_groups))

    async def play(self, document: JobDocument, steps: int, first: int = 0) -> None:
        """Play the other roles in strict mode: each step's groups are sampled from the version before it."""
        for step in range(first, first + steps):
            await self.version(document, step)
            await self.assign(document, step, range(document.spec.training.groups_per_step))
            await self.close(document, step, document.spec.training.groups_per_step)
        await self.version(document, first + steps)

    async def log(self, document: JobDocument, message: GroupLogEntry) -> None:
        subject = subjects.group(document.namespace, document.job, "policy")
        await self.bus.publish(subject, wire.encode(message))

    # rollout and sandbox --------------------------------------------------------------------------------------------

    async def _group(self, document: JobDocument, step: int, position: int, record: PolicyRecord) -> GroupReady:
        index = step * document.spec.training.groups_per_step + position
        name = train_group(document.ref, index)
        manifest = await self.manifest(record)
        weights = load(await self.blobs.get(manifest.files[TENSORS_FILE]))
        self.sampler.merge(weights, document.spec.agents[0].adapter.alpha / manifest.rank)
        # all at once: another job's group may be sampled, with its own weights, while a turn is published
        turns = [self._turn(document, manifest, name, member) for member in range(document.spec.rollout.group_size)]
        refs = []
        for member, turn in enumerate(turns):
            recorded = self.tamper(turn)
            if recorded is not None:
                await self.publish_turn(recorded)
            reward = float(np.mean(np.frombuffer(turn.output_ids, np.int32) % 2 == 0)) + 0.1 * member
            refs.append(TrajectoryRef(member=member, episode=turn.episode, leaves=(0,), reward=reward))
        return GroupReady(
            namespace=document.namespace,
            job=document.job,
            uid=document.uid,
            agent="policy",
            step=step,
            base_version=record.version,
            position=position,
            group=name,
            index=index,
            version=record.version,
            trajectories=tuple(refs),
        )

    def _turn(self, document: JobDocument, manifest: Manifest, group: str, member: int) -> Turn:
        seed = derive_seed(document.seed, group.removeprefix(document.uid), member)
        prompt = [seed // 7**place % VOCABULARY for place in range(3 + seed % 4)]
        temperature = document.spec.rollout.temperature
        ids, logprobs = self.sampler.sample(prompt, 2 + seed % 5, temperature, seed)
        return Turn(
            namespace=document.namespace,
            job=document.job,
            uid=document.uid,
            agent="policy",
            group=group,
            member=member,
            episode=episode_id(group, member, 1),
            turn=0,
            parent=None,
            version=manifest.version,
            adapter_sha256=manifest.files[TENSORS_FILE].sha256,
            opens_segment=True,
            append="",
            prompt_ids=pack_ids(prompt),
            output_ids=pack_ids(ids),
            logprobs=pack_logprobs(logprobs),
            text="",
            stop_reason=StopReason.LENGTH,
            temperature=temperature,
            meter=Meter(prompt_tokens=len(prompt), output_tokens=len(ids)),
            replica="rollout-0",
            at=self.clock(),
        )

    async def publish_turn(self, turn: Turn) -> None:
        await self.bus.publish(subjects.turn("team-a", turn.job, turn.episode, turn.turn), wire.encode(turn))

    # committed versions ---------------------------------------------------------------------------------------------------

    async def record(self, document: JobDocument) -> PolicyRecord:
        entry = await (await self.bus.bucket(subjects.POLICY)).get(assignment_of(document).policy_key)
        assert entry is not None
        assert entry.data is not None
        return wire.decode_as(PolicyRecord, entry.data)

    async def version(self, document: JobDocument, version: int) -> PolicyRecord:
        """Wait until a version is committed."""
        return await self.until(document, lambda record: record.version >= version)

    async def until(self, document: JobDocument, condition: Any) -> PolicyRecord:
        """Wait for a policy record of the job."""
        key = assignment_of(document).policy_key
        async with (await self.bus.bucket(subjects.POLICY)).watch() as changes:
            async for entry in changes:
                if entry.key == key and entry.data is not None:
                    record = wire.decode_as(PolicyRecord, entry.data)
                    if record.uid == document.uid and condition(record):
                        return record
        raise AssertionError("the watch ended")

    async def manifest(self, record: PolicyRecord) -> Manifest:
        assert record.manifest is not None
        return wire.decode_as(Manifest, await self.blobs.get(record.manifest))

    async def history(self, document: JobDocument) -> list[Manifest]:
        """All versions, the newest first."""
        manifests = [await self.manifest(await self.record(document))]
        while manifests[-1].parent is not None:
            manifests.append(wire.decode_as(Manifest, await self.blobs.get(manifests[-1].parent)))
        return manifests

    async def weights(self, manifest: Manifest) -> dict[str, Tensor]:
        """A version's weights."""
        return dict(load(await self.blobs.get(manifest.files[TENSORS_FILE])))

    async def groups(self, document: JobDocument, step: int) -> list[list[Segment]]:
        """Segments of a step's groups, weighed by the environment's rewards."""
        found = []
        expected = Expectation(document.spec.rollout.temperature, VOCABULARY, {})
        for stored in await self.bus.replay(subjects.GROUPS, subjects.group("team-a", document.job, "policy")):
            message = wire.decode(stored.data)
            if isinstance(message, GroupReady) and message.step == step:
                group = await read_group(self.bus, self.blobs, message, expected)
                found += weighing(document.spec).segments([group])
        return found

    async def adapter(self, document: JobDocument) -> bytes:
        """The present version's tensors file."""
        return await self.blobs.get((await self.manifest(await self.record(document))).files[TENSORS_FILE])

    async def emitted(self, document: JobDocument, reason: str) -> JobEvent:
        """Wait for an event of the job with this reason."""
        subject = subjects.event(document.namespace, document.job, "trainer")
        while True:
            for stored in await self.bus.replay(subjects.EVENTS, subject):
                event = wire.decode_as(JobEvent, stored.data)
                if event.reason == reason:
                    return event
            await self.server.change(None, None)
