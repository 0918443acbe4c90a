"""The rollout role against the bare engine: 64 conversations at once, the same prompts, lengths, seeds and adapters, in the same vLLM, in turns.

The role is asked over a real nats-server by a client in the same process (so its cost counts as the role's); bare is `AsyncLLM.generate`
with nothing around it. Then how soon a committed version speaks while 16 other requests run: from the write of the policy key to the answer
of a one-token request that is pinned to the new version.
"""

import asyncio
import contextlib
import random
import statistics
import string
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.rollout_engine import SHAPES, base_model, make_adapter
from bench.runs import table
from marlaas.models.tokenizer import VOCABULARY, save_tokenizer
from marlaas_api import subjects, wire
from marlaas_api.blobs import BlobRef, Blobs
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus import Request
from marlaas_api.bus_nats import NatsBus, connect
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec
from marlaas_api.messages import (
    ChatMessage,
    GenerateReply,
    GenerateRequest,
    JobDocument,
    Manifest,
    Phase,
    Pin,
    PolicyRecord,
    Progress,
    ReplicaReport,
    ReplyPhase,
)
from marlaas_api.names import derive_seed, episode_id, group_token, request_id, train_group
from marlaas_api.nats_server import EmbeddedNats
from marlaas_worker.role import RoleContext
from marlaas_worker.rollout.conversation import extend
from marlaas_worker.rollout.engine import LoadedAdapter, Sampling
from marlaas_worker.rollout.service import serve_engine
from marlaas_worker.rollout.tokenizer import PretrainedTokenizer
from marlaas_worker.rollout.vllm_engine import VllmEngine, _last, _lora_request, _sampling

POOL, REPLICA = "pool", "rollout-0"
JOBS, CONCURRENT, TURNS_EACH, GROUP, RANK = 8, 64, 3, 8, 16
FEWEST_TOKENS, MOST_TOKENS = 16, 48
ROUNDS, COMMITS, RUNNING = 15, 30, 16


@dataclass
class Client:
    """A sandbox's side: one inbox, answers by the request's name."""

    bus: NatsBus
    inbox: str
    waiting: dict[str, "asyncio.Future[GenerateReply]"] = field(default_factory=dict)

    async def hear(self, message: Request) -> None:
        reply = wire.decode_as(GenerateReply, message.data)
        if reply.phase in (ReplyPhase.RESULT, ReplyPhase.FAILED) and reply.request in self.waiting:
            self.waiting.pop(reply.request).set_result(reply)

    async def ask(self, request: GenerateRequest) -> int:
        """Ask for a turn; return its number of tokens."""
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
    """A served pool: its engine, its jobs, and who asks."""

    bus: NatsBus
    blobs: Blobs
    engine: VllmEngine
    tokenizer: PretrainedTokenizer
    client: Client
    folder: Path
    jobs: list[JobDocument] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    indices: Any = field(default_factory=lambda: iter(range(10**6)))

    async def put(self, bucket: str, key: str, message: Any) -> None:
        await (await self.bus.bucket(bucket)).put(key, wire.encode(message))

    async def submit(self, number: int) -> None:
        spec = RLJobSpec.model_validate(
            {
                "poolRef": {"name": POOL},
                "environment": {"name": "reverse"},
                "training": {"steps": 1},
                "rollout": {"maxTokens": MOST_TOKENS},
            }
        )
        job = JobDocument(
            namespace="bench", job=f"job-{number}", uid=f"u{number}", pool=POOL, tenant="t", seed=number, spec=spec
        )
        fields = {"namespace": job.namespace, "job": job.job, "uid": job.uid}
        progress = Progress(**fields, phase=Phase.RUNNING, admitted=True, reason="Bench", steps=1)
        self.jobs.append(job)
        await self.put(subjects.JOBS, job.ref.key, job)
        await self.put(subjects.PROGRESS, job.ref.key, progress)
        await self.commit(job, 1, await self.publish(job, 1, self.manifests[number]))

    async def publish(self, job: JobDocument, version: int, made: Manifest) -> BlobRef:
        """Put a version of a job with the tensors of an adapter that was made."""
        folder = f"{job.namespace}/{job.job}/{job.uid}/policy/v{version}"
        source = self.folder / made.agent
        files = {name: await self.blobs.put(folder, name, (source / name).read_bytes()) for name in made.files}
        names = {"namespace": job.namespace, "job": job.job, "uid": job.uid, "agent": "policy"}
        manifest = made.model_copy(update={**names, "version": version, "step": version - 1, "files": files})
        return await self.blobs.put(folder, "manifest", wire.encode(manifest))

    async def commit(self, job: JobDocument, version: int, ref: BlobRef) -> None:
        key = subjects.policy_key(job.namespace, job.job, "policy")
        await self.put(subjects.POLICY, key, PolicyRecord(uid=job.uid, version=version, manifest=ref))

    async def verified(self, name: str) -> None:
        """Wait until the role says that it has proven a version."""
        bucket = await self.bus.bucket(subjects.REPLICAS)
        async with bucket.watch(f"rollout.{POOL}.") as entries:
            async for entry in entries:
                if entry.data is not None and name in wire.decode_as(ReplicaReport, entry.data).verified:
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
        """Per conversation, its requests, one after another; groups of eight share a prompt, as in training."""
        first = [next(self.indices) for _ in range(TURNS_EACH)]
        jobs = self.jobs[:num_jobs]
        return [
            [self.request(jobs[n // GROUP % num_jobs], 1000 * index + n // GROUP, n % GROUP) for index in first]
            for n in range(CONCURRENT)
        ]


async def rate(plan: list[list[GenerateRequest]], one: Callable[[GenerateRequest], Awaitable[int]]) -> float:
    """Tokens per second of all conversations at once."""

    async def converse(requests: list[GenerateRequest]) -> int:
        return sum([await one(request) for request in requests])

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(converse(requests) for requests in plan)))
    return tokens / (time.perf_counter() - began)


def bare(bench: Bench) -> Callable[[GenerateRequest], Awaitable[int]]:
    """`AsyncLLM.generate` for the same request, tokenised beforehand."""
    assert bench.engine._life is not None
    llm = bench.engine._life.llm
    held: dict[str, LoadedAdapter] = {one.name: one for one in bench.engine._residents._held.values()}
    calls = iter(range(10**6))
    jobs = {job.job: job for job in bench.jobs}
    prompts: dict[str, list[int]] = {}

    async def generate(request: GenerateRequest) -> int:
        job = jobs[request.job]
        if request.group not in prompts:
            prompts[request.group] = extend(bench.tokenizer, None, request.append).ids.tolist()
        seed = derive_seed(job.seed, group_token(request.group), request.member, request.turn)
        most = request.max_tokens or MOST_TOKENS
        params = _sampling(Sampling(1.0, most, seed), most, frozenset())
        lora = _lora_request(held[f"bench.{job.job}.{job.uid}.policy@v1"])
        prompt = {"prompt_token_ids": prompts[request.group]}
        output = await _last(llm.generate(prompt, params, f"bare-{next(calls)}", lora_request=lora))
        return len(output.outputs[0].token_ids)

    return generate


async def throughput(bench: Bench, num_jobs: int) -> list[Any]:
    """Medians over rounds, each side first in every other round; CPU of our process per request, in ms."""
    sides = {"role": bench.client.ask, "bare": bare(bench)}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-1, ROUNDS):
        for name in sorted(sides, reverse=bool(number % 2)):
            before = time.process_time()
            tokens_per_s = await rate(bench.plan(num_jobs), sides[name])
            if number >= 0:
                rates[name].append(tokens_per_s)
                cpu[name].append((time.process_time() - before) * 1000 / (CONCURRENT * TURNS_EACH))
    ratios = sorted(role / raw for role, raw in zip(rates["role"], rates["bare"], strict=True))
    figures = [f"{statistics.median(rates[name]):.0f}" for name in ("role", "bare")]
    costs = [f"{statistics.median(cpu[name]):.2f}" for name in ("role", "bare")]
    return [num_jobs, *figures, f"{statistics.median(ratios):.1%}", f"{ratios[3]:.0%} to {ratios[-4]:.0%}", *costs]


async def commit_to_first_token(bench: Bench) -> list[float]:
    """Seconds from the write of the policy key to the answer of a request pinned to the new version, one per commit."""
    stop = asyncio.Event()

    async def keep_running(number: int) -> None:
        while not stop.is_set():
            job = bench.jobs[1 + number % (JOBS - 1)]
            await bench.client.ask(bench.request(job, next(bench.indices) * 1000 + 500, number % GROUP))

    running = [asyncio.create_task(keep_running(number)) for number in range(RUNNING)]
    seconds = []
    for version in range(2, COMMITS + 2):
        job = bench.jobs[0]
        ref = await bench.publish(job, version, bench.manifests[JOBS + version % 2])
        request = bench.request(job, next(bench.indices) * 1000 + 700, 0, max_tokens=1)
        await bench.put(
            subjects.PINS, subjects.pin_key(job.namespace, job.job, "policy", request.group), Pin(version=version)
        )
        await asyncio.sleep(0.3)
        began = time.perf_counter()
        await bench.commit(job, version, ref)
        await bench.client.ask(request)
        seconds.append(time.perf_counter() - began)
    stop.set()
    await asyncio.gather(*running)
    return seconds


@contextlib.asynccontextmanager
async def served(scratch: Path) -> AsyncIterator[Bench]:
    """A random model of the tiny one's shape, ten random adapters, eight jobs, one replica."""
    model = make_model(scratch / "model")
    base = base_model(model)
    manifests = [make_adapter(base, scratch / f"a{number}", number) for number in range(JOBS + 2)]
    del base
    rollout = {"dtype": "float32", "maxNumSeqs": CONCURRENT, "kvCacheBytes": "256Mi", "maxModelLen": 512}
    pool = {"model": {"path": str(model)}, "adapterSlots": JOBS + 1, "maxRank": RANK, "rollout": rollout}
    engine = VllmEngine(model, ModelPoolSpec.model_validate(pool), frozenset(), scratch / "vllm")
    tokenizer = PretrainedTokenizer.load(str(model))
    async with EmbeddedNats(scratch / "nats") as server:
        buses = [await connect(server.url, name=name) for name in (REPLICA, "sandbox")]
        await buses[1].ensure()
        blobs = open_blobs(scratch / "blobs")
        context = RoleContext(REPLICA, buses[0], blobs, scratch / "role")
        role = asyncio.create_task(serve_engine(context, POOL, tokenizer, engine))
        client = Client(buses[1], buses[1].new_inbox())
        bench = Bench(buses[1], blobs, engine, tokenizer, client, scratch, manifests=manifests)
        async with buses[1].listen(client.inbox, client.hear):
            for number in range(JOBS):
                await bench.submit(number)
                await bench.verified(f"bench.job-{number}.u{number}.policy@v1")
            yield bench
        context.stop.set()
        await role
        for bus in buses:
            await bus.close()


def make_model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {**SHAPES["tiny"], "vocab_size": len(VOCABULARY)}
    LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, initializer_range=0.05)).save_pretrained(folder)
    save_tokenizer(folder, 512)
    return folder


async def measure() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        async with served(Path(scratch)) as bench:
            rows = [await throughput(bench, num_jobs) for num_jobs in (1, JOBS)]
            cpu = ["role ms CPU/request", "bare ms CPU/request"]
            head = ["adapters", "role tok/s", "bare tok/s", "ratio, median of rounds", "middle rounds", *cpu]
            print(table(head, rows))
            seconds = sorted(await commit_to_first_token(bench))
            p50, p90 = statistics.median(seconds), seconds[int(0.9 * len(seconds))]
            print(f"\ncommit to first token, {RUNNING} other requests running: p50 {p50:.3f} s, p90 {p90:.3f} s")
            print(f"resident memory of this process: {psutil.Process().memory_info().rss >> 20} MiB")


def main() -> None:
    asyncio.run(measure())


if __name__ == "__main__":
    main()
