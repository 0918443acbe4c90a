"""The rollout role against the bare engine: 64 concurrent conversations, the same prompts, lengths, seeds and adapters, in the same vLLM, in turns.

The role receives requests over a real nats-server from a client in the same process (so the client's cost counts as
the role's); bare is `AsyncLLM.generate` alone. Then the latency of a committed version while 16 other requests run:
from the write of the policy key to the reply to a one-token request that is pinned to the new version.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from bench.rollout_engine import at_the_end, num_tokens
from bench.rollout_pool import CONCURRENT, GROUP, JOBS, MOST_TOKENS, TURNS_EACH, Bench, engine_name, served
from bench.runs import table
from marlaas_api import subjects
from marlaas_api.messages import GenerateRequest, Pin
from marlaas_api.names import derive_seed, group_token
from marlaas_worker.rollout.conversation import extend
from marlaas_worker.rollout.engine import LoadedAdapter, Sampling
from marlaas_worker.rollout.vllm_engine import _lora_request, _sampling

ROUNDS, COMMITS, RUNNING = 15, 30, 16


async def rate(plan: list[list[GenerateRequest]], one: Callable[[GenerateRequest], Awaitable[int]]) -> float:
    """Return the tokens per second of all conversations at once."""

    async def converse(requests: list[GenerateRequest]) -> int:
        return sum([await one(request) for request in requests])

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*(converse(requests) for requests in plan)))
    return tokens / (time.perf_counter() - began)


def bare(bench: Bench) -> Callable[[GenerateRequest], Awaitable[int]]:
    """Run `AsyncLLM.generate` for the same request, tokenised beforehand."""
    assert bench.engine._incarnation is not None
    llm = bench.engine._incarnation.llm
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
        params = at_the_end(_sampling(Sampling(1.0, most, seed), most, frozenset()))
        lora = _lora_request(held[engine_name(job, 1)])
        prompt = {"prompt_token_ids": prompts[request.group]}
        return await num_tokens(llm.generate(prompt, params, f"bare-{next(calls)}", lora_request=lora))

    return generate


async def throughput(bench: Bench, num_jobs: int) -> list[Any]:
    """Return medians over rounds, with the first side alternating; CPU of our process per request, in ms."""
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
    rates_text = [f"{statistics.median(rates[name]):.0f}" for name in ("role", "bare")]
    costs = [f"{statistics.median(cpu[name]):.2f}" for name in ("role", "bare")]
    return [num_jobs, *rates_text, f"{statistics.median(ratios):.1%}", f"{ratios[3]:.0%} to {ratios[-4]:.0%}", *costs]


async def commit_to_first_token(bench: Bench) -> list[float]:
    """Return seconds from the write of the policy key to the reply to a request pinned to the new version, one per commit."""
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
