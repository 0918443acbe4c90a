"""The limiter never reserves more tokens than the KV cache holds, and the reservations are enough for real outputs."""

import asyncio
import math
import random

from marlaas_worker.rollout.accounts import Account
from marlaas_worker.rollout.kv_budget import BLOCK_TOKENS, KvBudget, Place, PrefillShares, RecentOutputs
from marlaas_worker.rollout.request_limiter import RequestLimiter


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
        async with self.limiter.place(account(tenant), prompt, expected, prompt + expected) as place:
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


async def test_reservations_stay_within_the_budget_and_outputs_within_the_cache() -> None:
    engine = Engine(max_seqs=32, kv_tokens=2048, seed=0)
    await asyncio.gather(*(engine.request(number) for number in range(600)))
    assert engine.limiter.budget.num_reserved == 0
    assert engine.most_running > 8, "p90 instead of maxTokens leaves room for more requests"
    assert engine.num_over <= engine.num_steps / 1000


async def test_a_request_queued_for_a_larger_cache_enters_the_empty_engine() -> None:
    """After a restart the engine may have fewer tokens than a queued request has reserved; it must not block the queue."""
    limiter, hold, entered = RequestLimiter(8, kv_tokens=512), asyncio.Event(), list[str]()

    async def run(name: str, tokens: int) -> None:
        async with limiter.place(account(name), tokens, 0, tokens):
            entered.append(name)
            await hold.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(run("first", 32))
        await asyncio.sleep(0)
        group.create_task(run("large", 512))
        await asyncio.sleep(0)
        limiter.set_kv_tokens(256)
        assert entered == ["first"]
        hold.set()
    assert entered == ["first", "large"]


def test_a_reservation_is_whole_blocks_and_never_more_than_the_budget() -> None:
    budget = KvBudget(2, 1000)
    assert [budget.size(tokens) for tokens in (0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 5000)] == [0, 32, 32, 64, 1000]


def test_without_a_sequence_there_is_no_room() -> None:
    budget = KvBudget(1, 100)
    budget.take(32)
    assert budget.room < 0
    budget.give_back(32)
    assert budget.room == math.inf, "the empty engine takes any request"


def test_an_estimate_is_of_the_last_64_outputs_of_the_job() -> None:
    outputs = RecentOutputs()
    for number in (*[900] * 64, *range(1, 65)):
        outputs.note("job", number)
    assert outputs.expected_tokens("job", 1000) == 58
    assert outputs.expected_tokens("job", 4) == 4
    assert outputs.expected_tokens("another", 1000) == 1000
    outputs.forget("job")
    assert outputs.expected_tokens("job", 1000) == 1000


def test_a_tenants_prompts_fill_its_share_of_a_step_and_a_lone_tenants_whole_steps() -> None:
    prefill = PrefillShares()
    for tenant in ("unlimited", "other"):
        prefill.join(tenant, 1.0)
        prefill.add(tenant, 10_000)
        assert prefill.allows(tenant, 10_000), "the size of a step is not known yet"
    prefill = PrefillShares()
    prefill.step_tokens = 200  # two steps count
    prefill.join("a", 1.0)
    prefill.add("a", 300)
    assert prefill.allows("a", 10_000), "no other tenant has requests"
    prefill.join("b", 3.0)
    assert not prefill.allows("a", 1), "its share is 100"
    assert prefill.allows("b", 10_000), "one prompt may be larger than the share"
    prefill.add("b", 200)
    assert [prefill.allows("b", number) for number in (100, 101)] == [True, False]
    prefill.add("a", -250)
    assert [prefill.allows("a", number) for number in (50, 51)] == [True, False]
    prefill.leave("b")
    assert prefill.allows("a", 10_000)
    prefill.leave("a")
    assert prefill._present == {}


class Prompts:
    """Requests with prompts, of two tenants. inside: those that have a place, with what ends them and what begins them."""

    def __init__(self) -> None:
        self.limiter = RequestLimiter(100, kv_tokens=100_000)
        self.limiter.prefill.step_tokens = 100
        self.inside: dict[str, Place] = {}
        self.over = asyncio.Event()

    async def run(self, name: str, num_prompt: int) -> None:
        async with self.limiter.place(account(name[0]), num_prompt, 10, num_prompt + 10) as place:
            self.inside[name] = place
            await self.over.wait()

    async def ask(self, *names: str, num_prompt: int) -> "list[asyncio.Task[None]]":
        tasks = [asyncio.create_task(self.run(name, num_prompt), name=name) for name in names]
        await self.settle()
        return tasks

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def begin(self, name: str) -> None:
        self.inside[name].begin()
        self.inside[name].begin()  # an engine may report the first token twice
        await self.settle()


async def test_prompts_of_one_tenant_wait_for_their_share_of_a_step_and_others_pass_them() -> None:
    prompts = Prompts()
    tasks = await prompts.ask("a0", "a1", num_prompt=90)
    assert sorted(prompts.inside) == ["a0", "a1"], "it is alone"
    tasks += await prompts.ask("b0", "b1", "b2", num_prompt=60)
    assert sorted(prompts.inside) == ["a0", "a1", "b0"], "each tenant has 100"
    tasks += await prompts.ask("a2", "a3", num_prompt=90)
    assert "a2" not in prompts.inside
    await prompts.begin("b0")
    assert sorted(prompts.inside) == ["a0", "a1", "b0", "b1"]
    await prompts.begin("a0")
    assert "a2" not in prompts.inside, "90 of 100 tokens are still computed"
    await prompts.begin("a1")
    assert "a2" in prompts.inside
    for task in tasks:  # requests that are cancelled, in the engine or not, leave nothing behind
        task.cancel()
    await asyncio.wait(tasks)
    assert prompts.limiter.prefill._present == {}
    assert (prompts.limiter.num_waiting, prompts.limiter.budget.num_reserved) == (0, 0)
