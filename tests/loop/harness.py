"""The whole loop in one process: every real role over an in-memory bus, with the reference engine and the tiny model.

A role can be killed between any two effects (`Loop.kill_at`) or at any moment, and is restarted under its own name, as a pod would be.
Environment code still runs in processes of its own.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from marlaas_api import failpoints, subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.documents import job_spec, pool_spec
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec
from marlaas_api.messages import (
    JobDocument,
    Manifest,
    Phase,
    PolicyRecord,
    PoolDocument,
    Progress,
    ReplicaReport,
    StepRecord,
)
from marlaas_api.wire import decode_as, encode
from marlaas_worker.orchestrator import service as orchestrator
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout import service as rollout
from marlaas_worker.sandbox import service as sandbox
from marlaas_worker.trainer import service as trainer


class Killed(BaseException):
    """A role died here (as kill -9 would have it: nothing is drained, nothing is said)."""


def document(name: str = "reverse", *, seed: int = 7, environment: str = "reverse", **training: object) -> JobDocument:
    """A small job on the pool `tiny`."""
    settings = {"steps": 2, "groupsPerStep": 2, "maxStaleness": 0, "microbatchTokens": 512, "maxRefill": 2} | training
    spec = job_spec(
        RLJobSpec.model_validate(
            {
                "poolRef": {"name": "tiny"},
                "environment": {"name": environment, "concurrency": 8},
                "rollout": {"groupSize": 4, "maxTokens": 16, "maxTurns": 4},
                "training": settings | {"optimizer": {"learningRate": 1e-3}},
                "evaluation": {"tasks": 2, "every": 100},
            }
        )
    )
    uid = hashlib.sha256(f"{name}{seed}".encode()).hexdigest()[:12]
    return JobDocument(namespace="team-a", job=name, uid=uid, pool="tiny", tenant="team-a", seed=seed, spec=spec)


class Loop:
    """Roles as tasks. Use as an async context manager."""

    def __init__(self, model: Path, scratch: Path, *, slots: int = 16, **rollout: object) -> None:
        self.server = MemoryServer()
        self.blobs = MemoryBlobs()
        self._scratch = scratch
        engine = {"engine": "reference", "dtype": "float32", "maxModelLen": 256} | rollout
        spec = pool_spec(
            ModelPoolSpec.model_validate(
                {"model": {"path": str(model)}, "adapterSlots": slots, "maxRank": 8, "rollout": engine}
            )
        )
        self.pool = PoolDocument(name="tiny", model_path=str(model), spec=spec)
        self._keepers: list[asyncio.Task[None]] = []
        self._armed: dict[str, int] = {}
        self.deaths: list[str] = []
        self.bus = self.server.connect("test")

    async def __aenter__(self) -> "Loop":
        await self.bus.ensure()
        failpoints.hook = self._pass
        self._keep("orchestrator", lambda c: orchestrator.serve(c))
        self._keep("rollout-0", lambda c: rollout.serve(c, self.pool))
        await self._reported("rollout", "rollout-0")
        self._keep("trainer-0", lambda c: trainer.serve(c, self.pool))
        return self

    async def __aexit__(self, *_: object) -> None:
        failpoints.hook = None
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def kill_at(self, name: str, times: int = 1) -> None:
        """Let whoever passes the failpoint die there, the first `times` times."""
        self._armed[name] = times

    def _pass(self, name: str) -> None:
        if self._armed.get(name, 0) > 0:
            self._armed[name] -= 1
            self.deaths.append(name)
            raise Killed(name)

    def _keep(self, name: str, serve: Callable[[RoleContext], Awaitable[None]]) -> None:
        self._keepers.append(asyncio.create_task(self._restart(name, serve), name=name))

    async def _restart(self, name: str, serve: Callable[[RoleContext], Awaitable[None]]) -> None:
        for life in range(20):
            scratch = self._scratch / f"{name}-{life}"
            scratch.mkdir(parents=True)
            context = RoleContext(name, self.server.connect(name), self.blobs, scratch)
            with contextlib.suppress(Killed):
                await _unwrapped(serve(context))
        raise AssertionError(f"{name} died too often")

    async def _reported(self, role: str, name: str) -> None:
        """Wait until the engine is started and needs the trainer: transformers cannot load two models at once in one process."""
        bucket = await self.bus.bucket(subjects.REPLICAS)
        async with asyncio.timeout(60), bucket.watch() as entries:
            async for entry in entries:
                known = entry.key == subjects.replica_key(role, "tiny", name) and entry.data
                if known and "calibrate" in decode_as(ReplicaReport, known).reason:
                    return

    async def submit(self, job: JobDocument) -> None:
        """Give a job to the loop, with a sandbox of its own."""
        bucket = await self.bus.bucket(subjects.JOBS)
        await bucket.put(subjects.job_key(job.namespace, job.job), encode(job))
        self._keep(f"sandbox-{job.job}", lambda c: sandbox.serve(c, job))

    async def finished(self, job: JobDocument, timeout_s: float = 60.0) -> Progress:
        """Wait for the job's end. Raises whatever ended a role for good, should one end."""
        end = asyncio.create_task(self._end(job))
        await asyncio.wait([end, *self._keepers], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()
        if not end.done():
            end.cancel()
            raise TimeoutError(f"{job.ref} has not ended after {timeout_s:g} s")
        return end.result()

    async def _end(self, job: JobDocument) -> Progress:
        bucket = await self.bus.bucket(subjects.PROGRESS)
        async with bucket.watch() as entries:
            async for entry in entries:
                if entry.key == job.ref.key and entry.data and (level := decode_as(Progress, entry.data)).phase.final:
                    return level
        raise AssertionError("the watch ended")

    async def policy(self, job: JobDocument) -> PolicyRecord:
        """The agent's policy."""
        bucket = await self.bus.bucket(subjects.POLICY)
        entry = await bucket.get(subjects.policy_key(job.namespace, job.job, "policy"))
        assert entry is not None
        assert entry.data is not None
        return decode_as(PolicyRecord, entry.data)

    async def manifests(self, job: JobDocument) -> list[Manifest]:
        """All versions, oldest first."""
        found, ref = [], (await self.policy(job)).manifest
        while ref is not None:
            manifest = decode_as(Manifest, await self.blobs.get(ref))
            found.append(manifest)
            ref = manifest.parent
        return found[::-1]

    async def steps(self, job: JobDocument) -> list[StepRecord]:
        """The record of every step."""
        stored = await self.bus.replay(subjects.STEPS, f"step.{job.namespace}.{job.job}.*")
        return [decode_as(StepRecord, one.data) for one in stored]


async def _unwrapped(life: Awaitable[None]) -> None:
    """A death within a TaskGroup is a death all the same."""
    try:
        await life
    except BaseExceptionGroup as group:
        killed, others = group.split(Killed)
        if killed is None or others is not None:
            raise
        raise Killed(str(killed)) from group


async def train(loop: Loop, job: JobDocument) -> tuple[list[str], list[StepRecord]]:
    """Run a job to its end; return the sha256 of every version's weights and the step records."""
    await loop.submit(job)
    level = await loop.finished(job)
    assert level.phase is Phase.SUCCEEDED, f"{level.reason}: {level.message}"
    weights = [manifest.files["adapter_model.safetensors"].sha256 for manifest in await loop.manifests(job)]
    return weights, await loop.steps(job)
