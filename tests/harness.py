"""Harness for the roles' services: a bus and blobs, roles that are killed and started again, builders of messages, and waits.

Each role's folder has a subclass, which plays the other roles where the real ones are not run.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tests.killing import Killed, kills

from marlaas_api import subjects, wire
from marlaas_api.blobs import BlobRef, Blobs
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import Bus
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.documents import job_spec, pool_spec
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec
from marlaas_api.messages import (
    BusMessage,
    Episode,
    JobDocument,
    JobEvent,
    Manifest,
    Meter,
    Phase,
    PolicyRecord,
    PoolDocument,
    Progress,
    ReplicaReport,
    StepOutcome,
    StepRecord,
    StopReason,
    Turn,
)
from marlaas_api.names import Split, episode_id, train_group
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.metrics import Metrics
from marlaas_worker.role import RoleContext

WITHIN_S = 150.0  # longest wait for a message or a state
Serve = Callable[[RoleContext], Awaitable[None]]
Dial = Callable[[str], Awaitable[Bus]]
Now = Callable[[], float]
M = TypeVar("M", bound=BusMessage)


@contextlib.asynccontextmanager
async def working(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside the test, cancel them at its end, and raise their errors."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


# messages -----------------------------------------------------------------------------------------------------------


def identity(of: Any) -> dict[str, Any]:
    """The fields that name a job, from any of its messages."""
    return {"namespace": of.namespace, "job": of.job, "uid": of.uid}


def job_document(name: str = "sums", namespace: str = "team-a", uid: str = "", **fields: Any) -> JobDocument:
    """A job on the pool `tiny`. fields: of the document, and `spec`, parts of the manifest's spec."""
    spec = {"poolRef": {"name": "tiny"}, "environment": {"name": "reverse"}, "training": {"steps": 1}}
    spec |= fields.pop("spec", {})
    document = {"namespace": namespace, "job": name, "uid": uid or f"uid-{name}", "tenant": namespace, **fields}
    return JobDocument(**{"pool": "tiny", **document}, spec=job_spec(RLJobSpec.model_validate(spec)))


def changed(document: JobDocument, **spec: Any) -> JobDocument:
    """The next generation of a document, with other values in its spec."""
    update = {"generation": document.generation + 1, "spec": document.spec.model_copy(update=spec)}
    return document.model_copy(update=update)


def pool_document(model: str | Path, name: str = "tiny", **spec: Any) -> PoolDocument:
    made = pool_spec(ModelPoolSpec.model_validate({"model": {"path": str(model)}, **spec}))
    return PoolDocument(name=name, model_path=str(model), spec=made)


def a_progress(document: JobDocument, **fields: Any) -> Progress:
    """The progress of a job that runs."""
    state = {"phase": Phase.RUNNING, "admitted": True, "reason": "Admitted", "steps": document.spec.training.steps}
    return Progress(**{**identity(document), **state, **fields})


def an_episode(document: JobDocument, index: int = 0, member: int = 0, **fields: Any) -> Episode:
    """The first attempt at a member of a training group."""
    group = train_group(document.ref, index)
    place = {"group": group, "split": Split.TRAIN, "index": index, "member": member}
    return Episode(**{**identity(document), **place, "episode": episode_id(group, member, 1), **fields})


def a_step(of: Any, step: int, **fields: Any) -> StepRecord:
    """The record of a committed step of one group, which has the step's number."""
    figures = {"at": 1.0, "wall_s": 1.0, "reward_mean": 0.5, "reward_std": 0.5, "num_groups": 1, "num_episodes": 2}
    made = {"step": step, "version": step + 1, "outcome": StepOutcome.COMMITTED, "indices": (step,)}
    return StepRecord(**{**identity(of), **made, **figures, **fields})


def a_turn(turn: int = 0, parent: int | None = None, **fields: Any) -> Turn:
    """A turn without tokens in the first episode of a job's first group."""
    names = {"namespace": "team-a", "job": "sums", "uid": "uid-sums", "agent": "policy"}
    place = {"group": "uid-sums-t0", "member": 0, "episode": "uid-sums-t0-0-1", "turn": turn, "parent": parent}
    sampled = {"version": 0, "adapter_sha256": "", "temperature": 1.0, "stop_reason": StopReason.STOP}
    tokens = {"prompt_ids": b"", "output_ids": b"", "logprobs": b"", "meter": Meter(prompt_tokens=0, output_tokens=0)}
    rest = {"opens_segment": parent is None, "append": "", "text": "", "replica": "rollout-0", "at": 0.0}
    return Turn(**{**names, **place, **sampled, **tokens, **rest, **fields})


def a_manifest(of: Any, version: int, **fields: Any) -> Manifest:
    """The manifest of a version of the agent `policy`, without files."""
    head = {"agent": "policy", "version": version, "step": version - 1, "parent": None, "rank": 8}
    content: dict[str, Any] = {"files": {}, "state": None, "tensor_digests": {}, "probes": ()}
    return Manifest(**{**identity(of), **head, **content, **fields})


# services -----------------------------------------------------------------------------------------------------------


class Harness:
    """A bus and blobs in memory, or on a real server (`dial`), with roles on them."""

    def __init__(
        self, scratch: Path, *, clock: Now | None = None, blobs: Blobs | None = None, dial: Dial | None = None
    ) -> None:
        self.scratch, self.dial, self.clock = scratch, dial, clock or time.time
        self.server = MemoryServer(clock or time.monotonic)
        self.bus: Bus = self.server.connect("test")
        self.blobs: Any = blobs or MemoryBlobs()
        self.deaths: list[str] = []
        self.metrics: dict[str, Metrics] = {}

    async def connect(self, name: str) -> Bus:
        """A connection of a role's own."""
        return self.server.connect(name) if self.dial is None else await self.dial(name)

    async def context(self, name: str, **fields: Any) -> RoleContext:
        """A role's context; fields: of `RoleContext`."""
        scratch = self.scratch / name
        scratch.mkdir(parents=True, exist_ok=True)
        made = RoleContext(
            name, await self.connect(name), **{"blobs": self.blobs, "now": self.clock, **fields}, scratch=scratch
        )
        self.metrics[name] = made.metrics
        return made

    async def keep(self, name: str, serve: Serve, stop: asyncio.Event | None = None) -> None:
        """Run a role until it is told to stop; a killed one starts again under its name, as a pod does."""
        while not (stop and stop.is_set()):
            context = await self.context(name, **({"stop": stop} if stop else {}))
            try:
                await serve(context)
                return
            except* Killed as killed:
                self.deaths += kills(killed)
                assert len(self.deaths) < 1000, f"{name} is killed too often"
            finally:
                await context.bus.close()

    @contextlib.asynccontextmanager
    async def role(self, name: str, serve: Serve) -> AsyncIterator[asyncio.Task[None]]:
        """Run a role beside the test, and drain it at the end."""
        stop = asyncio.Event()
        task = asyncio.create_task(self.keep(name, serve, stop))
        try:
            yield task
        finally:
            stop.set()
            await task

    async def put(self, bucket: str, key: str, message: BusMessage) -> None:
        await (await self.bus.bucket(bucket)).put(key, wire.encode(message))

    async def submit(self, document: JobDocument) -> None:
        await self.put(subjects.JOBS, document.ref.key, document)

    async def admit(self, document: JobDocument, **progress: Any) -> None:
        """Write a job's document and its progress."""
        await self.submit(document)
        await self.put(subjects.PROGRESS, document.ref.key, a_progress(document, **progress))

    async def put_report(self, role: str = "rollout", replica: str = "rollout-0", **fields: Any) -> None:
        report = ReplicaReport(**{"role": role, "pool": "tiny", "replica": replica, **fields})
        await self.put(subjects.REPLICAS, subjects.replica_key(role, report.pool, replica), report)

    async def put_policy(self, record: PolicyRecord, document: JobDocument, agent: str = "policy") -> None:
        await self.put(subjects.POLICY, self.policy_key(document, agent), record)

    @staticmethod
    def policy_key(document: JobDocument, agent: str = "policy") -> str:
        return subjects.policy_key(document.namespace, document.job, agent)

    async def get(self, kind: type[M], bucket: str, key: str) -> M | None:
        entry = await (await self.bus.bucket(bucket)).get(key)
        return None if entry is None or entry.data is None else wire.decode_as(kind, entry.data)

    async def wait_for(
        self, kind: type[M], bucket: str, key: str, wanted: Callable[[M], bool], within_s: float = WITHIN_S
    ) -> M:
        """Wait until a key has a value as wanted."""
        async with asyncio.timeout(within_s), (await self.bus.bucket(bucket)).watch() as entries:
            async for entry in entries:
                if entry.key == key and entry.data and wanted(found := wire.decode_as(kind, entry.data)):
                    return found
        raise AssertionError("the watch ended")

    async def until(self, condition: Callable[[], bool], within_s: float = WITHIN_S) -> None:
        """Wait for a state of which no message tells."""
        async with asyncio.timeout(within_s):
            while not condition():
                await self.server.change(0.02, None)

    async def progress(
        self, document: JobDocument, wanted: Callable[[Progress], bool], within_s: float = WITHIN_S
    ) -> Progress:
        def is_it(found: Progress) -> bool:
            return found.uid == document.uid and wanted(found)

        return await self.wait_for(Progress, subjects.PROGRESS, document.ref.key, is_it, within_s)

    async def record(self, document: JobDocument, agent: str = "policy") -> PolicyRecord:
        found = await self.get(PolicyRecord, subjects.POLICY, self.policy_key(document, agent))
        assert found is not None
        return found

    async def committed(
        self, document: JobDocument, wanted: Callable[[PolicyRecord], bool], agent: str = "policy"
    ) -> PolicyRecord:
        """Wait for a policy record of the job."""
        key, uid = self.policy_key(document, agent), document.uid
        return await self.wait_for(PolicyRecord, subjects.POLICY, key, lambda found: found.uid == uid and wanted(found))

    async def manifest(self, ref: BlobRef | None) -> Manifest:
        assert ref is not None
        return wire.decode_as(Manifest, await self.blobs.get(ref))

    async def history(self, document: JobDocument, agent: str = "policy") -> list[Manifest]:
        """All versions of an agent, the newest first."""
        manifests = [await self.manifest((await self.record(document, agent)).manifest)]
        while manifests[-1].parent is not None:
            manifests.append(await self.manifest(manifests[-1].parent))
        return manifests

    async def adapter(self, document: JobDocument, agent: str = "policy") -> bytes:
        """The present version's tensors file."""
        tensors: bytes = await self.blobs.get((await self.history(document, agent))[0].files[TENSORS_FILE])
        return tensors

    async def steps(self, document: JobDocument) -> list[StepRecord]:
        """The records of a job's steps."""
        stored = await self.bus.replay(subjects.STEPS, f"step.{document.namespace}.{document.job}.*")
        return [wire.decode_as(StepRecord, one.data) for one in stored]

    async def emitted(self, document: JobDocument, reason: str) -> JobEvent:
        """Wait for an event of the job with this reason."""
        subject = subjects.event(document.namespace, document.job, "*")
        async with asyncio.timeout(WITHIN_S):
            while True:
                for stored in await self.bus.replay(subjects.EVENTS, subject):
                    event = wire.decode_as(JobEvent, stored.data)
                    if event.reason == reason:
                        return event
                await self.server.change(1.0, None)

    async def reported(
        self, wanted: Callable[[ReplicaReport], bool], role: str, replica: str, pool: str = "tiny"
    ) -> ReplicaReport:
        """Wait for a replica's report."""
        key = subjects.replica_key(role, pool, replica)
        return await self.wait_for(ReplicaReport, subjects.REPLICAS, key, wanted)
