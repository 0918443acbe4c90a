"""Replicas of the rollout role on one bus, and the parts of orchestrator, trainer and sandbox."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.harness import Harness, a_manifest, job_document
from tests.rollout.service.asking import Asked, Job
from tests.rollout.service.scripted import POOL, CharacterTokenizer, ScriptedEngine, adapter_files, calibration_of, gain

from marlaas_api import subjects, wire
from marlaas_api.blobs import BlobRef
from marlaas_api.bus import Request
from marlaas_api.messages import (
    CancelRequest,
    GenerateReply,
    GenerateRequest,
    KeepRequest,
    Phase,
    Pin,
    PolicyRecord,
    Probe,
    ReplicaReport,
    ReplyPhase,
    Turn,
)
from marlaas_api.names import AdapterRef
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


class RolloutHarness(Harness):
    """The replicas of the rollout role, and the jobs and versions on their bus."""

    def __init__(self, scratch: Path, **fields: Any) -> None:
        super().__init__(scratch, **fields)
        self.replicas: list[Replica] = []
        self._manifests: dict[AdapterRef, BlobRef] = {}
        self._jobs = 0
        self.shares_cpu = False

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
        context = await self.context(name)
        context = replace(context, scratch=self.scratch / f"{name}-{len(self.replicas)}", shares_cpu=self.shares_cpu)
        task = asyncio.create_task(serve_engine(context, POOL, CharacterTokenizer(trims), engine))
        replica = Replica(name, engine, context, task)
        self.replicas.append(replica)
        return replica

    async def serving(self, engine: ScriptedEngine | None = None, **spec: Any) -> tuple[Replica, Job]:
        """A replica and a job."""
        return await self.replica(engine=engine), await self.job(**spec)

    async def calibrate(self, engine: ScriptedEngine, **changes: Any) -> None:
        """The trainer's part before any engine serves: what such engines score under no adapter and under the self-test's."""
        calibration = calibration_of(engine).model_copy(update=changes)
        await self.put(subjects.CALIBRATIONS, subjects.calibration_key(POOL, calibration.dtype), calibration)

    async def job(self, name: str = "job", admitted: bool = True, **spec: Any) -> Job:
        """Submit a job with version 0."""
        self._jobs += 1
        parts = {"poolRef": {"name": POOL}, "training": {"steps": 1, "maxStaleness": 1}, **spec}
        job = Job(job_document(name, "team", f"uid{self._jobs}", pool=POOL, seed=7, spec=parts))
        await self.admit(job, admitted)
        await self.commit(job, 0)
        return job

    async def admit(self, job: Job, admitted: bool = True) -> None:
        phase = Phase.RUNNING if admitted else Phase.QUEUED
        await super().admit(job.document, phase=phase, admitted=admitted)

    async def publish(
        self, job: Job, version: int, seed: int | None = None, agent: str = "policy", **changes: Any
    ) -> BlobRef:
        """Put a version's blobs; the policy does not yet point to it. `seed` makes its tensors, the version if not given."""
        adapter = job.adapter(version, agent)
        files = adapter_files(version if seed is None else seed)
        folder = self.scratch / "published" / adapter.engine_name
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        tensors, config = read_adapter(folder)
        fields: dict[str, Any] = {
            "parent": self._manifests.get(job.adapter(version - 1, agent)),
            "files": {name: await self.blobs.put(adapter.blob_prefix, name, data) for name, data in files.items()},
            "tensor_digests": tensor_digests(tensors, config.scaling),
            "probes": (Probe(ids=pack_ids(PROBE), logprobs=pack_logprobs([gain(folder)] * (len(PROBE) - 1))),),
        }
        manifest = a_manifest(job.document, version, **{**fields, "agent": agent, **changes})
        ref: BlobRef = await self.blobs.put(adapter.blob_prefix, "manifest", wire.encode(manifest))
        self._manifests[adapter] = ref
        return ref

    async def commit(
        self, job: Job, version: int, ref: BlobRef | None = None, agent: str = "policy", **changes: Any
    ) -> None:
        """Make a version true."""
        ref = ref or await self.publish(job, version, agent=agent, **changes)
        await self.put_policy(PolicyRecord(uid=job.uid, version=version, manifest=ref), job.document, agent)

    async def commit_verified(self, job: Job, version: int, name: str = "rollout-0") -> None:
        """Make a version true, and wait until a replica serves it."""
        await self.commit(job, version)
        await self.verified(name, job.adapter(version))

    async def pin(self, request: GenerateRequest, version: int) -> None:
        key = subjects.pin_key(request.namespace, request.job, request.agent, request.group)
        await self.put(subjects.PINS, key, Pin(version=version))

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

    async def result(self, request: GenerateRequest, of: str | None = None) -> GenerateReply:
        """Ask, and return the result, which must not be a failure."""
        reply = await self.ask(request, of)
        assert reply.phase is ReplyPhase.RESULT, reply.error
        return reply

    async def failure(self, request: GenerateRequest, of: str | None = "rollout-0") -> GenerateReply:
        """Ask, and return the failure."""
        reply = await self.ask(request, of)
        assert reply.phase is ReplyPhase.FAILED
        return reply

    async def turn(self, request: GenerateRequest) -> Turn | None:
        subject = subjects.turn(request.namespace, request.job, request.episode, request.turn)
        stored = await self.bus.last(subjects.TURNS, subject)
        return None if stored is None else wire.decode_as(Turn, stored.data)

    async def report(self, name: str, wanted: Callable[[ReplicaReport], bool]) -> ReplicaReport:
        """The replica's report, once it is as wanted."""
        return await self.reported(wanted, "rollout", name, POOL)

    async def verified(self, name: str, adapter: AdapterRef) -> None:
        await self.report(name, lambda report: adapter.engine_name in report.verified)

    async def close(self) -> None:
        self.server.available = True
        for replica in self.replicas:
            replica.engine.open.set()
            if not replica.task.done():
                await replica.kill()
