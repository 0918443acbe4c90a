"""The limiter never reserves more tokens than the KV cache holds, and the reservations are enough for real outputs."""

import asyncio
import contextlib
import math
import random

import pytest

from marlaas_worker.rollout.accounts import Account
from marlaas_worker.rollout.kv_budget import BLOCK_TOKENS, KvBudget, Place, RecentOutputs
from marlaas_worker.rollout.supervised_engine import RequestLimiter


def account(tenant: str) -> Account:
    return Account(tenant, 1.0, f"{tenant}-job")


class Engine:
    """A fake engine that counts the tokens that its requests really hold, and the steps at which they exceed its cache."""

    def __init__(self, max_seqs: int, kv_tokens: int, seed: int) -> None:
        self.limiter = RequestLimiter(max_seqs, kv_tokens=kv_tokens)
        self.max_seqs, self.kv_tokens = max_seqs, kv_tokens
        self.random = random.Random(seed)
        self.num_tokens = self.num_running = self.num_steps = self.num_over = self.most_running = 0

    async def request(self, number: int) -> None:
        tenant = f"tenant-{number % 3}"
        prompt, output = self.random.randint(1, 120), min(64, int(self.random.lognormvariate(2.5, 0.7)))
        expected = self.limiter.outputs.expected_tokens(tenant, 64)
        async with self.limiter.place(account(tenant), prompt + expected, prompt + expected) as place:
            self.check()
            await self.decode(prompt, output, place)
        self.limiter.outputs.note(tenant, output)

    async def decode(self, prompt: int, output: int, place: Place) -> None:
        self.num_running += 1
        self.num_tokens += prompt
        try:
            for _ in range(output):
                self.num_tokens += 1
                self.num_steps += 1
                self.num_over += self.num_tokens > self.kv_tokens
                await asyncio.sleep(0)
            place.cost = prompt + output
        finally:
            self.num_running -= 1
            self.num_tokens -= prompt + output

    def check(self) -> None:
        self.most_running = max(self.most_running, self.num_running + 1)
        assert self.num_running < self.max_seqs
        assert self.limiter.budget.num_reserved <= self.kv_tokens


@pytest.mark.parametrize("seed", range(5))
async def test_reservations_stay_within_the_budget_and_outputs_within_the_cache(seed: int) -> None:
    engine = Engine(max_seqs=32, kv_tokens=2048, seed=seed)
    await asyncio.gather(*(engine.request(number) for number in range(600)))
    assert engine.limiter.budget.num_reserved == 0
    assert engine.most_running > 8, "p90 instead of maxTokens leaves room for more requests"
    assert engine.num_over <= engine.num_steps / 1000


async def test_requests_that_are_cancelled_while_they_wait_or_run_give_their_room_back() -> None:
    engine, chosen = Engine(max_seqs=4, kv_tokens=512, seed=1), random.Random(1)
    tasks = [asyncio.create_task(engine.request(number)) for number in range(120)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        chosen.choice(tasks).cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)
    assert (engine.limiter.budget.num_reserved, engine.limiter.num_waiting) == (0, 0)


async def test_a_request_queued_for_a_larger_cache_enters_the_empty_engine() -> None:
    """After a restart the engine may have fewer tokens than a queued request has reserved; it must not block the queue."""
    limiter, hold, entered = RequestLimiter(8, kv_tokens=512), asyncio.Event(), list[str]()

    async def run(name: str, tokens: int) -> None:
        async with limiter.place(account(name), tokens, tokens):
            entered.append(name)
            await hold.wait()

    async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
        group.create_task(run("first", 32))
        await asyncio.sleep(0)
        group.create_task(run("large", 512))
        await asyncio.sleep(0)
        limiter.set_kv_tokens(256)
        assert entered == ["first"]
        hold.set()
    assert entered == ["first", "large"]


async def test_a_large_request_is_passed_for_at_most_one_cache_of_tokens() -> None:
    limiter, entered = RequestLimiter(100, kv_tokens=320), list[str]()
    hold, done = asyncio.Event(), asyncio.Event()

    async def run(name: str, tokens: int, until: asyncio.Event) -> None:
        async with limiter.place(account(name[0]), tokens, tokens):
            entered.append(name)
            await until.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(run("a", 64, hold))
        await asyncio.sleep(0)
        group.create_task(run("large", 320, done))
        for number in range(30):
            await asyncio.sleep(0)
            group.create_task(run(f"s{number}", 32, done))
        for _ in range(10):
            await asyncio.sleep(0)
        assert entered == ["a", *(f"s{number}" for number in range(8))], "the cache is full"
        done.set()
        for _ in range(100):
            await asyncio.sleep(0)
        assert entered[-1] == "s9", "ten requests of 32 tokens passed it; the queue now waits for it"
        hold.set()
    assert entered[11] == "large"


def test_a_reservation_is_whole_blocks_and_never_more_than_the_budget() -> None:
    budget = KvBudget(2, 1000)
    assert [budget.size(tokens) for tokens in (0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 5000)] == [0, 32, 32, 64, 1000]


def test_without_a_sequence_there_is_no_room() -> None:
    budget = KvBudget(1, 100)
    budget.take(32)
    assert budget.room < 0
    budget.give_back(32)
    assert budget.room == math.inf, "the empty engine takes any request"


def test_estimates_of_a_job_that_is_gone_are_forgotten() -> None:
    outputs = RecentOutputs()
    outputs.note("job", 3)
    assert outputs.expected_tokens("job", 64) == 3
    outputs.forget("job")
    outputs.forget("another")
    assert outputs.expected_tokens("job", 64) == 64
