"""The sandbox role alone: memory of a child, latency of a fork, and episodes per second with a rollout role that replies at once.

Memory: resident (shared pages counted in every process), proportional (shared pages divided), private (this process
alone).
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from marlaas_api import subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import Bus, Request
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.documents import job_spec
from marlaas_api.kinds import RLJobSpec
from marlaas_api.messages import (
    ChatMessage,
    GenerateReply,
    GenerateRequest,
    JobDocument,
    ReplyPhase,
    StopReason,
    TaskMessage,
)
from marlaas_api.names import Split, derive_seed, train_group
from marlaas_api.wire import decode, encode
from marlaas_worker.role import RoleContext
from marlaas_worker.sandbox.channel import encode_frame, read_frame
from marlaas_worker.sandbox.seclusion import clean_variables
from marlaas_worker.sandbox.server import Children
from marlaas_worker.sandbox.server_start import ChildrenConfig, start_server
from marlaas_worker.sandbox.service import serve

NUM_FORKS = 200
NUM_GROUPS = 60
GROUP_SIZE = 8
SUMS = {"dataset": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}}
MIB = 1 << 20


def main() -> None:
    asyncio.run(_main())


async def _main() -> None:
    for name, args in (("reverse", {}), ("calculator", {}), ("reasoning-gym", SUMS)):
        await _measure_children(name, args)
    for name in ("reverse", "calculator"):
        await _measure_episodes(name)


async def _measure_children(name: str, args: dict[str, Any]) -> None:
    """Fork children one after another up to their first turn."""
    begun = time.perf_counter()
    latencies: list[float] = []
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = ChildrenConfig(name, args, 512 * MIB, 60.0, Path(folder) / "episodes", clean_variables(os.environ))
        children = Children(partial(start_server, config))
        try:
            for index in range(NUM_FORKS):
                started = time.perf_counter()
                async with children.child() as child:
                    start = {"split": "train", "index": index, "seed": 0, "agents": ["policy"]}
                    child.writer.write(encode_frame(start))
                    await read_frame(child.reader)
                    latencies.append(time.perf_counter() - started)
                    await asyncio.sleep(0.01)  # the fork server's own report may be behind
                    memory = _memory(child.server.pids[child.number])
                if index == 0:
                    print(f"{name}: fork server ready and first turn asked after {time.perf_counter() - begun:.2f} s")
        finally:
            await children.close()
    held = ", ".join(f"{kind} {value:.1f} MiB" for kind, value in memory.items())
    p95 = quantiles(latencies[1:], n=20)[-1]
    print(f"{name}: one child holds {held}")
    print(f"{name}: fork to first turn p50 {1e3 * median(latencies[1:]):.1f} ms, p95 {1e3 * p95:.1f} ms")


def _memory(pid: int) -> dict[str, float]:
    lines = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:] if ":" in line
    )
    kib = {key: int(value.split()[0]) for key, value in lines.items()}
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    return {"resident": kib["Rss"] / 1024, "proportional": kib["Pss"] / 1024, "private": private / 1024}


async def _measure_episodes(name: str) -> None:
    server = MemoryServer()
    bus = server.connect("bench")
    await bus.ensure()
    claimed = subjects.consumer("bench", "job", "sandbox")
    await bus.consumer(subjects.TASKS, claimed, subjects.task("bench", "job"), ack_wait_s=subjects.TASK_ACK_WAIT_S)
    document = _document(name)
    with tempfile.TemporaryDirectory() as folder:
        context = RoleContext("sandbox-0", server.connect("sandbox"), MemoryBlobs(), Path(folder))
        async with _rollout(bus), asyncio.TaskGroup() as group:
            group.create_task(serve(context, document))
            await _play(bus, document, range(2))
            begun = time.perf_counter()
            cpu = time.process_time()
            await _play(bus, document, range(2, 2 + NUM_GROUPS))
            wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
            context.stop.set()
    num = NUM_GROUPS * GROUP_SIZE
    print(f"{name}: {num / wall_s:.0f} episodes/s; the supervisor used {1e3 * cpu_s / num:.2f} ms of CPU per episode")


async def _play(bus: Bus, document: JobDocument, indices: range) -> None:
    """Submit tasks and wait for all episodes."""
    consumer = await bus.consumer(subjects.EPISODES, "bench", subjects.episode(document.namespace, document.job))
    for index in indices:
        await bus.publish(subjects.task(document.namespace, document.job), encode(_task(document, index)))
    left = len(indices) * GROUP_SIZE
    while left:
        for delivery in await consumer.fetch(1, 1.0):
            await delivery.ack()
            left -= 1


@asynccontextmanager
async def _rollout(bus: Bus) -> AsyncIterator[None]:
    async def answer(request: Request) -> None:
        message = decode(request.data)
        if isinstance(message, GenerateRequest):
            await bus.send(request.reply, encode(answer_turn(message)))

    async with bus.listen(subjects.generation("bench", "job", "policy"), answer, "rollout"):
        yield


def answer_turn(request: GenerateRequest) -> GenerateReply:
    """Return the reply to a turn: the sum as a call of `calc`, else the same text again."""
    last = request.append[-1]
    asked = last.content if isinstance(last, ChatMessage) else last
    text = f"calc: {asked.removesuffix('=?')}" if asked.endswith("=?") else asked
    name = f"{request.episode}.{request.turn}"
    return GenerateReply(
        request=name, phase=ReplyPhase.RESULT, replica="rollout-0", text=text, stop_reason=StopReason.STOP, num_tokens=8
    )


def _document(name: str) -> JobDocument:
    spec = job_spec(
        RLJobSpec.model_validate({"poolRef": {"name": "tiny"}, "environment": {"name": name}, "training": {"steps": 1}})
    )
    return JobDocument(namespace="bench", job="job", uid="u1", pool="tiny", tenant="bench", spec=spec)


def _task(document: JobDocument, index: int) -> TaskMessage:
    return TaskMessage(
        namespace=document.namespace,
        job=document.job,
        uid=document.uid,
        group=train_group(document.ref, index),
        split=Split.TRAIN,
        index=index,
        seed=derive_seed(0, Split.TRAIN, index),
        group_size=GROUP_SIZE,
    )
