"""Replicas of the rollout role on one bus, and the parts of orchestrator, trainer and sandbox."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.rollout.service.asking import Asked, Job
from tests.rollout.service.scripted import POOL, CharacterTokenizer, ScriptedEngine, adapter_files, calibration_of, gain

from marlaas_api import subjects, wire
from marlaas_api.blobs import BlobRef
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import Bus, Request
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_nats import connect
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import (
    BusMessage,
    CancelRequest,
    GenerateReply,
    GenerateRequest,
    JobDocument,
    JobEvent,
    KeepRequest,
    Manifest,
    Phase,
    Pin,
    PolicyRecord,
    Probe,
    Progress,
    ReplicaReport,
    Turn,
)
from marlaas_api.names import AdapterRef
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.adapters import read_adapter, tensor_digests
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.service import serve_engine

PROBE = np.arange(10, 18, dtype=np.int32)


@dataclass
class Replica:
    """One rollout role, with its engine and its blobs."""

    name: str
    engine: ScriptedEngine
    context: RoleContext
    task: "asyncio.Task[None]"

    async def stop(self) -> None:
        self.context.stop.set()
        await self.task

    async def kill(self) -> None:
        """As kill -9 would: nothing is drained, nothing is said."""
        await self.context.bus.close()
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BaseExceptionGroup):
            await self.task


class RolloutHarness:
    """A bus, a blob store, and the replicas, jobs and versions on them."""

    def __init__(self, scratch: Path) -> None:
        self.server = MemoryServer()
        self.bus: Bus = self.server.connect("test")
        self.blobs = MemoryBlobs()
        self.scratch = scratch
        self.replicas: list[Replica] = []
        self._manifests: dict[AdapterRef, BlobRef] = {}
        self._jobs = 0

    async def connect(self, name: str) -> Bus:
        """A connection of a role's own."""
        return self.server.connect(name)

    async def replica(
        self, name: str = "rollout-0", engine: ScriptedEngine | None = None, trims: bool = False
    ) -> Replica:
        """Start a replica, and wait until it can serve; its engine lets everything go unless it was given."""
        if engine is None:
            engine = ScriptedEngine()
            engine.open.set()
        await self.calibrate(engine)
        replica = await self.begin(name, engine, trims)
        await self.report(name, lambda report: report.ready)
        return replica

    async def begin(self, name: str, engine: ScriptedEngine, trims: bool = False) -> Replica:
        """Start a replica, whether or not it can ever serve."""
        scratch = self.scratch / f"{name}-{len(self.replicas)}"
        context = RoleContext(name, await self.connect(name), self.blobs, scratch)
        task = asyncio.create_task(serve_engine(context, POOL, CharacterTokenizer(trims), engine))
        replica = Replica(name, engine, context, task)
        self.replicas.append(replica)
        return replica

    async def calibrate(self, engine: ScriptedEngine, **changes: Any) -> None:
        """The trainer's part before any engine serves: what such engines score under no adapter and under the self-test's."""
        calibration = calibration_of(engine).model_copy(update=changes)
        key = subjects.calibration_key(POOL, calibration.dtype)
        await self.put(subjects.CALIBRATIONS, key, calibration)

    async def job(self, name: str = "job", admitted: bool = True, **spec: Any) -> Job:
        """Submit a job with version 0."""
        self._jobs += 1
        fields: dict[str, Any] = {
            "poolRef": {"name": POOL},
            "environment": {"name": "reverse"},
            "training": {"steps": 1, "maxStaleness": 1},
        }
        document = JobDocument(
            namespace="team",
            job=name,
            uid=f"uid{self._jobs}",
            pool=POOL,
            tenant="team",
            seed=7,
            spec=job_spec(RLJobSpec.model_validate({**fields, **spec})),
        )
        job = Job(document)
        await self.put(subjects.JOBS, document.ref.key, document)
        await self.admit(job, admitted)
        await self.commit(job, 0)
        return job

    async def admit(self, job: Job, admitted: bool = True) -> None:
        phase = Phase.RUNNING if admitted else Phase.QUEUED
        fields = job.document.model_dump(include={"namespace", "job", "uid"})
        progress = Progress(**fields, phase=phase, admitted=admitted, reason="Test", steps=1)
        await self.put(subjects.PROGRESS, job.document.ref.key, progress)

    async def publish(self, job: Job, version: int, seed: int | None = None, **changes: Any) -> BlobRef:
        """Put a version's blobs; the policy does not yet point to it. `seed` makes its tensors, the version if not given."""
        adapter = job.adapter(version)
        files = adapter_files(version if seed is None else seed)
        folder = self.scratch / "published" / adapter.engine_name
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        tensors, config = read_adapter(folder)
        fields: dict[str, Any] = {
            **job.document.model_dump(include={"namespace", "job", "uid"}),
            "agent": "policy",
            "version": version,
            "step": version - 1,
            "parent": self._manifests.get(job.adapter(version - 1)),
            "rank": 8,
            "files": {name: await self.blobs.put(adapter.blob_prefix, name, data) for name, data in files.items()},
            "state": None,
            "tensor_digests": tensor_digests(tensors, config.scaling),
            "probes": (Probe(ids=pack_ids(PROBE), logprobs=pack_logprobs([gain(folder)] * (len(PROBE) - 1))),),
        }
        manifest = Manifest(**{**fields, **changes})
        ref = await self.blobs.put(adapter.blob_prefix, "manifest", wire.encode(manifest))
        self._manifests[adapter] = ref
        return ref

    async def commit(self, job: Job, version: int, ref: BlobRef | None = None, **changes: Any) -> None:
        """Make a version true."""
        ref = ref or await self.publish(job, version, **changes)
        key = subjects.policy_key(job.document.namespace, job.document.job, "policy")
        await self.put(subjects.POLICY, key, PolicyRecord(uid=job.uid, version=version, manifest=ref))

    async def pin(self, request: GenerateRequest, version: int) -> None:
        key = subjects.pin_key(request.namespace, request.job, request.agent, request.group)
        await self.put(subjects.PINS, key, Pin(version=version))

    async def put(self, bucket: str, key: str, message: BusMessage) -> None:
        await (await self.bus.bucket(bucket)).put(key, wire.encode(message))

    @contextlib.asynccontextmanager
    async def asking(
        self, request: GenerateRequest | CancelRequest | KeepRequest, of: str | None = None
    ) -> AsyncIterator[Asked]:
        """Ask the pool, or one replica directly, and listen."""
        asked, inbox = Asked(), self.bus.new_inbox()

        async def hear(reply: Request) -> None:
            asked.hear(wire.decode_as(GenerateReply, reply.data))

        async with self.bus.listen(inbox, hear):
            subject = subjects.generation(request.namespace, request.job, request.agent)
            await self.bus.send(subjects.engine(POOL, of) if of else subject, wire.encode(request), inbox)
            yield asked

    async def ask(self, request: GenerateRequest, of: str | None = None) -> GenerateReply:
        """Ask until somebody listens, as a sandbox does, and return the end of it."""
        while True:
            async with self.asking(request, of) as asked:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await asked.more.wait()
                if asked.heard:
                    return await asked.end()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that has no event of its own."""
        while not condition():
            await self.server.change(0.02, None)

    async def turn(self, request: GenerateRequest) -> Turn | None:
        subject = subjects.turn(request.namespace, request.job, request.episode, request.turn)
        stored = await self.bus.last(subjects.TURNS, subject)
        return None if stored is None else wire.decode_as(Turn, stored.data)

    async def story(self, reason: str) -> JobEvent:
        """The first event of this reason, once it is told."""
        while True:
            for stored in await self.bus.replay(subjects.EVENTS, "event.>"):
                event = wire.decode_as(JobEvent, stored.data)
                if event.reason == reason:
                    return event
            await self.server.change(1.0, None)

    async def report(self, name: str, wanted: Callable[[ReplicaReport], bool]) -> ReplicaReport:
        """The replica's report, once it is as wanted."""
        bucket = await self.bus.bucket(subjects.REPLICAS)
        async with bucket.watch(f"rollout.{POOL}.") as entries:
            async for entry in entries:
                report = wire.decode_as(ReplicaReport, entry.data) if entry.data else None
                if report is not None and report.replica == name and wanted(report):
                    return report
        raise AssertionError

    async def verified(self, name: str, adapter: AdapterRef) -> None:
        await self.report(name, lambda report: adapter.engine_name in report.verified)

    async def close(self) -> None:
        self.server.available = True
        for replica in self.replicas:
            replica.engine.open.set()
            if not replica.task.done():
                await replica.kill()


class NatsRolloutHarness(RolloutHarness):
    """The same on a real nats-server, which can be killed."""

    def __init__(self, scratch: Path, nats: EmbeddedNats, bus: Bus) -> None:
        super().__init__(scratch)
        self.nats = nats
        self.bus = bus

    async def connect(self, name: str) -> Bus:
        return await connect(self.nats.url, name=name)
