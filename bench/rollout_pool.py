"""A served pool to measure: a random model, adapters, jobs, one replica on a real nats-server, and a client that requests turns."""

import asyncio
import contextlib
import random
import string
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.rollout_engine import SHAPES, base_model, make_adapter
from marlaas.models.tokenizer import VOCABULARY, save_tokenizer
from marlaas_api import subjects, wire
from marlaas_api.blobs import BlobRef, Blobs
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus import Request
from marlaas_api.bus_nats import NatsBus, connect
from marlaas_api.documents import job_spec, pool_spec
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec
from marlaas_api.messages import (
    ChatMessage,
    GenerateReply,
    GenerateRequest,
    JobDocument,
    Manifest,
    Phase,
    PolicyRecord,
    PoolDocument,
    Progress,
    ReplicaReport,
    ReplyPhase,
)
from marlaas_api.names import AdapterRef, episode_id, request_id, train_group
from marlaas_api.nats_server import EmbeddedNats
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.service import serve_engine
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer
from marlaas_worker.rollout.vllm_engine import VllmEngine
from marlaas_worker.trainer.calibration import calibrate
from marlaas_worker.trainer.model import BaseModel

POOL = "pool"

JOBS, CONCURRENT, TURNS_EACH, GROUP, RANK = 8, 64, 3, 8, 16

FEWEST_TOKENS, MOST_TOKENS = 16, 48


@dataclass
class Client:
    """A sandbox's side: one inbox; replies are matched to requests by the request's name."""

    bus: NatsBus
    inbox: str
    waiting: dict[str, "asyncio.Future[GenerateReply]"] = field(default_factory=dict)

    async def receive(self, message: Request) -> None:
        reply = wire.decode_as(GenerateReply, message.data)
        if reply.phase in (ReplyPhase.RESULT, ReplyPhase.FAILED) and reply.request in self.waiting:
            self.waiting.pop(reply.request).set_result(reply)

    async def ask(self, request: GenerateRequest) -> int:
        """Request a turn; return its number of tokens."""
        answer: asyncio.Future[GenerateReply] = asyncio.get_running_loop().create_future()
        self.waiting[request_id(request.episode, request.turn)] = answer
        subject = subjects.generation(request.namespace, request.job, request.agent)
        await self.bus.send(subject, wire.encode(request), self.inbox)
        reply = await answer
        if reply.phase is ReplyPhase.FAILED:
            raise RuntimeError(reply.error)
        return reply.num_tokens


@dataclass
class Bench:
    """A served pool: its engine, its jobs, and a client. roles: contexts of the replicas."""

    bus: NatsBus
    blobs: Blobs
    engine: VllmEngine
    tokenizer: PretrainedTokenizer
    client: Client
    folder: Path
    num_tenants: int = 1
    roles: list[RoleContext] = field(default_factory=list)
    jobs: list[JobDocument] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    indices: Any = field(default_factory=lambda: iter(range(10**6)))
    published: dict[tuple[str, int], BlobRef] = field(default_factory=dict)

    async def put(self, bucket: str, key: str, message: Any) -> None:
        await (await self.bus.bucket(bucket)).put(key, wire.encode(message))

    async def submit(self, number: int) -> None:
        spec = job_spec(
            RLJobSpec.model_validate(
                {
                    "poolRef": {"name": POOL},
                    "environment": {"name": "reverse"},
                    "training": {"steps": 1},
                    "rollout": {"maxTokens": MOST_TOKENS},
                }
            )
        )
        tenant, name = f"team-{number % self.num_tenants}", f"job-{number // self.num_tenants}"
        job = JobDocument(
            namespace=tenant, job=name, uid=f"u{number}", pool=POOL, tenant=tenant, seed=number, spec=spec
        )
        fields = {"namespace": job.namespace, "job": job.job, "uid": job.uid}
        progress = Progress(**fields, phase=Phase.RUNNING, admitted=True, reason="Bench", steps=1)
        self.jobs.append(job)
        await self.put(subjects.JOBS, job.ref.key, job)
        await self.put(subjects.PROGRESS, job.ref.key, progress)
        await self.commit(job, 1, await self.publish(job, 1, self.manifests[number]))

    async def publish(self, job: JobDocument, version: int, made: Manifest) -> BlobRef:
        """Publish a version of a job with the tensors of an adapter created earlier."""
        folder = f"{job.namespace}/{job.job}/{job.uid}/policy/v{version}"
        source = self.folder / made.agent
        files = {name: await self.blobs.put(folder, name, (source / name).read_bytes()) for name in made.files}
        names = {"namespace": job.namespace, "job": job.job, "uid": job.uid, "agent": "policy"}
        parent = self.published.get((job.uid, version - 1))
        update = {**names, "version": version, "step": version - 1, "files": files, "parent": parent}
        ref = await self.blobs.put(folder, "manifest", wire.encode(made.model_copy(update=update)))
        self.published[job.uid, version] = ref
        return ref

    async def commit(self, job: JobDocument, version: int, ref: BlobRef) -> None:
        key = subjects.policy_key(job.namespace, job.job, "policy")
        await self.put(subjects.POLICY, key, PolicyRecord(uid=job.uid, version=version, manifest=ref))

    async def verified(self, job: JobDocument, version: int) -> None:
        """Wait until a replica reports that it has proven a version."""
        name = engine_name(job, version)
        await self.reported(lambda report: name in report.verified)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over the replicas."""
        return sum(one.value for role in self.roles for one in role.metrics.all_samples() if one.name == name)

    async def ready(self, replica: str) -> None:
        """Wait until a replica is ready."""
        await self.reported(lambda report: report.replica == replica and report.ready)

    async def reported(self, wanted: Callable[[ReplicaReport], bool]) -> None:
        """Wait for a report of a replica."""
        bucket = await self.bus.bucket(subjects.REPLICAS)
        async with bucket.watch(f"rollout.{POOL}.") as entries:
            async for entry in entries:
                if entry.data is not None and wanted(wire.decode_as(ReplicaReport, entry.data)):
                    return

    def request(self, job: JobDocument, index: int, member: int, max_tokens: int | None = None) -> GenerateRequest:
        group = train_group(job.ref, index)
        chance = random.Random(f"{job.job} {index} {member}")
        words = random.Random(f"{job.job} {index}").choices(string.ascii_lowercase, k=22)
        return GenerateRequest(
            namespace=job.namespace,
            job=job.job,
            uid=job.uid,
            agent="policy",
            group=group,
            member=member,
            episode=episode_id(group, member, 1),
            turn=0,
            parent=None,
            append=(ChatMessage(role="user", content="".join(words)),),
            max_tokens=max_tokens or chance.randint(FEWEST_TOKENS, MOST_TOKENS),
            deadline_s=300.0,
        )

    def plan(self, num_jobs: int) -> list[list[GenerateRequest]]:
        """Return each conversation's consecutive requests; groups of eight share a prompt, as in training."""
        first = [next(self.indices) for _ in range(TURNS_EACH)]
        jobs = self.jobs[:num_jobs]
        return [
            [self.request(jobs[n // GROUP % num_jobs], 1000 * index + n // GROUP, n % GROUP) for index in first]
            for n in range(CONCURRENT)
        ]


def engine_name(job: JobDocument, version: int) -> str:
    """Return the name of a version of a job in the engine."""
    return AdapterRef(job.namespace, job.job, job.uid, "policy", version).engine_name


@dataclass(frozen=True)
class Served:
    """What to serve. tenants: each has a namespace, and the jobs in turn. adapters: number of random adapters. size: as in `make_adapter`."""

    jobs: int = JOBS
    tenants: int = 1
    slots: int = JOBS + 1
    replicas: int = 1
    adapters: int = JOBS + 2
    size: float = 0.01


@contextlib.asynccontextmanager
async def served(scratch: Path, wanted: Served = Served()) -> AsyncIterator[Bench]:
    """Serve a random model of the tiny model's shape, with random adapters and jobs."""
    model = make_model(scratch / "model")
    base = base_model(model)
    manifests = [make_adapter(base, scratch / f"a{number}", number, wanted.size) for number in range(wanted.adapters)]
    del base
    rollout = {"dtype": "float32", "maxNumSeqs": CONCURRENT, "kvCacheBytes": "256Mi", "maxModelLen": 512}
    pool = {"model": {"path": str(model)}, "adapterSlots": wanted.slots, "maxRank": RANK, "rollout": rollout}
    document = PoolDocument(name=POOL, model_path=str(model), spec=pool_spec(ModelPoolSpec.model_validate(pool)))
    calibration = calibrate(BaseModel(str(model)), document)
    tokenizer = PretrainedTokenizer.load(str(model))
    async with EmbeddedNats(scratch / "nats") as server, contextlib.AsyncExitStack() as stack:
        bus = await connect(server.url, name="sandbox")
        await bus.ensure()
        key = subjects.calibration_key(POOL, calibration.dtype)
        await (await bus.bucket(subjects.CALIBRATIONS)).put(key, wire.encode(calibration))
        blobs = open_blobs(scratch / "blobs")
        client = Client(bus, bus.new_inbox())
        engines = [
            VllmEngine(model, document.spec, frozenset(), scratch / f"vllm-{number}")
            for number in range(wanted.replicas)
        ]
        bench = Bench(bus, blobs, engines[0], tokenizer, client, scratch, wanted.tenants, manifests=manifests)
        for number, engine in enumerate(engines):
            bus_of_replica = await connect(server.url, name=f"rollout-{number}")
            context = RoleContext(f"rollout-{number}", bus_of_replica, blobs, scratch / f"role-{number}")
            await stack.enter_async_context(_role(context, tokenizer, engine))
            bench.roles.append(context)
        async with bus.listen(client.inbox, client.receive):
            for role in bench.roles:
                await bench.ready(role.name)
            for number in range(wanted.jobs):
                await bench.submit(number)
                if wanted.jobs < wanted.slots:
                    await bench.verified(bench.jobs[number], 1)
            yield bench
        await bus.close()


@contextlib.asynccontextmanager
async def _role(context: RoleContext, tokenizer: PretrainedTokenizer, engine: VllmEngine) -> AsyncIterator[None]:
    role = asyncio.create_task(serve_engine(context, POOL, tokenizer, engine))
    yield
    context.stop.set()
    await role
    await context.bus.close()


def make_model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {**SHAPES["tiny"], "vocab_size": len(VOCABULARY)}
    LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, initializer_range=0.05)).save_pretrained(folder)
    save_tokenizer(folder, 512)
    return folder
