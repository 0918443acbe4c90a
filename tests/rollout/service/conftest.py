"""What the rollout role's tests share: an engine whose replies are scripted, a tokenizer of characters, and a town of replicas on one memory bus.

The engine reads adapters and answers for what it read, as a real one does; what it draws is a function of its inputs.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from marlaas_api import subjects, wire
from marlaas_api.arrays import pack_ids, pack_logprobs
from marlaas_api.blobs import BlobRef
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import Bus, Request
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.bus_nats import connect
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import (
    CancelRequest,
    ChatMessage,
    GenerateReply,
    GenerateRequest,
    JobDocument,
    Manifest,
    Message,
    Phase,
    Pin,
    PolicyRecord,
    Probe,
    Progress,
    ReplicaReport,
    ReplyPhase,
    StopReason,
    StoryEvent,
    Turn,
)
from marlaas_api.names import AdapterRef, episode_id, train_group
from marlaas_api.nats_server import EmbeddedNats
from marlaas_worker.adapters import AdapterConfig, read_adapter, tensor_digests, tensor_name, write_adapter
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.conversation import BadAppend
from marlaas_worker.rollout.engine import Completion, EngineDown, EngineLimits, LoadedAdapter, LoadFailed, Sampling
from marlaas_worker.rollout.service import serve_engine

END = 1
POOL = "pool"
LIMITS = EngineLimits(slots=4, max_rank=8, max_model_len=1000, max_num_seqs=16, dtype="float32")
PROBE = np.arange(10, 18, dtype=np.int32)


class CharacterTokenizer:
    """One id per character; `~` is the end token. A template of one line per message; it trims on demand."""

    end_ids = frozenset({END})

    def __init__(self, trims: bool = False) -> None:
        self.trims = trims

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[str] = ()) -> str:
        if not messages:
            raise BadAppend("no messages")
        contents = [message.content.strip() if self.trims else message.content for message in messages]
        lines = [f"<{message.role}>{content}~" for message, content in zip(messages, contents, strict=True)]
        return "".join(lines) + "<assistant>"

    def encode(self, text: str) -> list[int]:
        return [END if character == "~" else ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token != END)

    def token_text(self, token: int) -> str:
        return "~" if token == END else chr(token)


@dataclass
class Call:
    """One generation as the engine saw it."""

    adapter: LoadedAdapter
    prompt_ids: list[int]
    sampling: Sampling


@dataclass
class ScriptedEngine:
    """See `engine.Engine`. `open` lets generations end; `reply` is what it draws; `deaths` generations kill it first; `twist` falsifies loads."""

    limits: EngineLimits = LIMITS
    reply: str = "yes~"
    deaths: int = 0
    refuse: str = ""
    loads_fail_by: Exception | None = None
    twist: Callable[[Path], Path] = lambda folder: folder
    open: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[Call] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    starts: int = 0
    _held: dict[LoadedAdapter, Path] = field(default_factory=dict)
    _down: asyncio.Future[str] | None = None

    async def start(self) -> None:
        self.starts += 1
        self._down = asyncio.get_running_loop().create_future()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def stop(self) -> None:
        self.die("stopped")
        self._held.clear()

    def die(self, reason: str = "killed") -> None:
        if self._down is not None and not self._down.done():
            self._down.set_result(reason)

    async def load(self, adapter: LoadedAdapter) -> None:
        self._check()
        if self.loads_fail_by is not None:
            raise self.loads_fail_by
        if self.refuse and self.refuse in adapter.name:
            raise LoadFailed(f"{adapter.name}: the engine does not like it")
        if len(self._held) >= self.limits.slots or any(held.name == adapter.name for held in self._held):
            raise LoadFailed(f"{adapter.name}: no room, or loaded already")
        self._held[adapter] = self.twist(adapter.folder)
        self.loads.append(adapter.name)

    async def unload(self, adapter: LoadedAdapter) -> None:
        self._check()
        if self._held.pop(adapter, None) is not None:
            self.unloads.append(adapter.name)

    async def digest(self, adapter: LoadedAdapter) -> str:
        self._check()
        tensors, config = read_adapter(self._held[adapter])
        return tensor_digests(tensors, config.scaling)[self.limits.dtype]

    async def score(self, adapter: LoadedAdapter, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        self._check()
        return np.full(len(ids) - 1, _gain(self._held[adapter]), np.float32)

    async def generate(
        self, request: str, adapter: LoadedAdapter, prompt_ids: npt.NDArray[np.int32], sampling: Sampling
    ) -> Completion:
        self._check()
        if adapter not in self._held:
            raise LoadFailed(f"{adapter.name} is not loaded")
        self.calls.append(Call(adapter, prompt_ids.tolist(), sampling))
        self.called.set()
        if self.deaths:
            self.deaths -= 1
            self.die("this request killed it")
        await self._let_go()
        ids = CharacterTokenizer().encode(self.reply)[: sampling.max_tokens]
        stop = StopReason.STOP if ids[-1] == END else StopReason.LENGTH
        return Completion(tuple(ids), tuple(-0.5 for _ in ids), stop)

    async def healthy(self) -> bool:
        return self._down is not None and not self._down.done()

    async def _let_go(self) -> None:
        assert self._down is not None
        opened = asyncio.ensure_future(self.open.wait())
        try:
            await asyncio.wait((opened, self._down), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        finally:
            opened.cancel()
        self._check()

    def _check(self) -> None:
        if self._down is None or self._down.done():
            raise EngineDown(self._down.result() if self._down else "not started")


def _gain(folder: Path) -> float:
    return float(read_adapter(folder)[0][tensor_name("layer", "B")].mean())


def adapter_files(seed: int) -> dict[str, bytes]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        tensor_name("layer", "A"): torch.randn(8, 4, generator=generator),
        tensor_name("layer", "B"): torch.randn(4, 8, generator=generator),
    }
    return write_adapter(tensors, AdapterConfig(8, 16, "base"))


@dataclass
class Job:
    """A job in the town, and how its sandbox names things."""

    document: JobDocument

    @property
    def uid(self) -> str:
        return self.document.uid

    def adapter(self, version: int, agent: str = "policy") -> AdapterRef:
        return AdapterRef(self.document.namespace, self.document.job, self.uid, agent, version)

    def request(self, index: int = 0, member: int = 0, turn: int = 0, **changes: Any) -> GenerateRequest:
        group = train_group(self.document.ref, index)
        fields: dict[str, Any] = {
            "namespace": self.document.namespace,
            "job": self.document.job,
            "uid": self.uid,
            "agent": "policy",
            "group": group,
            "member": member,
            "episode": episode_id(group, member, 1),
            "turn": turn,
            "parent": turn - 1 if turn else None,
            "append": (ChatMessage(role="user", content=f"question {turn}"),),
            "deadline_s": 60.0,
        }
        return GenerateRequest(**{**fields, **changes})


@dataclass
class Asked:
    """A request's answers as they come."""

    heard: list[GenerateReply] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    more: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, reply: GenerateReply) -> None:
        self.heard.append(reply)
        self.more.set()
        if reply.phase in (ReplyPhase.RESULT, ReplyPhase.FAILED):
            self.over.set()

    async def until(self, phase: ReplyPhase) -> GenerateReply:
        while not any(reply.phase is phase for reply in self.heard):
            self.more.clear()
            await self.more.wait()
        return next(reply for reply in self.heard if reply.phase is phase)

    async def end(self) -> GenerateReply:
        await self.over.wait()
        return self.heard[-1]


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


class Town:
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
        scratch = self.scratch / f"{name}-{len(self.replicas)}"
        context = RoleContext(name, await self.connect(name), self.blobs, scratch)
        task = asyncio.create_task(serve_engine(context, POOL, CharacterTokenizer(trims), engine))
        replica = Replica(name, engine, context, task)
        self.replicas.append(replica)
        await self.report(name, lambda report: report.ready)
        return replica

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
            spec=RLJobSpec.model_validate({**fields, **spec}),
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
            "probes": (Probe(ids=pack_ids(PROBE), logprobs=pack_logprobs([_gain(folder)] * (len(PROBE) - 1))),),
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

    async def put(self, bucket: str, key: str, message: Message) -> None:
        await (await self.bus.bucket(bucket)).put(key, wire.encode(message))

    @contextlib.asynccontextmanager
    async def asking(self, request: GenerateRequest | CancelRequest, of: str | None = None) -> AsyncIterator[Asked]:
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

    async def story(self, reason: str) -> StoryEvent:
        """The first event of this reason, once it is told."""
        while True:
            for stored in await self.bus.replay(subjects.EVENTS, "event.>"):
                event = wire.decode_as(StoryEvent, stored.data)
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


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    made = Town(tmp_path)
    await made.bus.ensure()
    yield made
    await made.close()


class NatsTown(Town):
    """The same on a real nats-server, which can be killed."""

    def __init__(self, scratch: Path, nats: EmbeddedNats, bus: Bus) -> None:
        super().__init__(scratch)
        self.nats = nats
        self.bus = bus

    async def connect(self, name: str) -> Bus:
        return await connect(self.nats.url, name=name)


@pytest.fixture
async def nats_town(tmp_path: Path) -> AsyncIterator[NatsTown]:
    async with EmbeddedNats(tmp_path / "nats") as nats:
        bus = await connect(nats.url, name="test")
        await bus.ensure()
        made = NatsTown(tmp_path, nats, bus)
        yield made
        await made.close()
        await bus.close()


@pytest.fixture
def shut_engine() -> ScriptedEngine:
    """An engine that lets no generation end until it is opened."""
    return ScriptedEngine()


@pytest.fixture
def make_engine() -> Callable[..., ScriptedEngine]:
    """Make engines that are open."""

    def make(**settings: Any) -> ScriptedEngine:
        limits = replace(LIMITS, **settings.pop("limits", {}))
        engine = ScriptedEngine(limits=limits, **settings)
        engine.open.set()
        return engine

    return make
