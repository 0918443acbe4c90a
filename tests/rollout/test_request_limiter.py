"""Places in the engine: who is next, episodes, and the room that requests reserve."""

import asyncio
import contextlib
import math
from collections import Counter

from marlaas_worker.rollout.request_limiter import (
    BLOCK_TOKENS,
    OPEN_S,
    Account,
    KvBudget,
    Place,
    RequestLimiter,
)


def account(job, tenant="team-a", weight=1.0):
    return Account(tenant, weight, job)


async def enter(limiter, entered, name, until, num_tokens=1):
    """Take a place as a job of this name, note it, and keep it until then."""
    async with limiter.place(account(name), num_tokens, 0, num_tokens):
        entered.append(name)
        await until.wait()


async def test_no_more_requests_enter_than_the_batch_and_the_cache_hold_and_a_request_costs_what_its_holder_says():
    limiter, inside, most = RequestLimiter(3, kv_tokens=128), Counter(), Counter()

    async def visit(job, num_tokens):
        async with limiter.place(account(job), 5, 0, num_tokens) as place:
            inside.update(requests=1, tokens=num_tokens)
            most.update({name: max(0, value - most[name]) for name, value in inside.items()})
            assert limiter.budget.num_reserved <= 128
            await asyncio.sleep(0)
            inside.subtract(requests=1, tokens=num_tokens)
            place.cost = 50.0

    with limiter.episodes.request(account("a"), "a-1"):
        with contextlib.suppress(RuntimeError):
            async with limiter.place(account("a"), 5, 0):
                raise RuntimeError("the engine refused it")
        assert limiter.usage("team-a") == 0, "and not the estimate"
        await asyncio.gather(*(visit(f"job-{number % 4}", 32 * (1 + number % 2)) for number in range(40)))
        assert limiter.usage("team-a") == 40 * 50
    assert most == {"requests": 3, "tokens": 128}
    assert (limiter.num_waiting, limiter.budget.num_reserved) == (0, 0)


async def test_an_episode_is_open_while_its_request_waits_and_for_a_while_after_its_last_request_has_ended():
    now = [0.0]
    limiter = RequestLimiter(1, clock=lambda: now[0])

    async def visit(tenant, episode, cost, takes_s=0.0):
        who = account("job", tenant)
        with limiter.episodes.request(who, episode):
            before = limiter.usage(tenant)
            async with limiter.place(who, 1, 0) as place:
                now[0] += takes_s
                place.cost = cost
        return before

    await visit("a", "a-1", 1.0, takes_s=2 * OPEN_S)
    for number in range(3):
        await visit("b", f"b-{number}", 100.0)
    now[0] += OPEN_S - 1
    assert await visit("a", "a-1", 0.0) == 1, "its episode waited for a tool, and keeps its credit"
    now[0] += OPEN_S + 1
    await visit("b", "b-4", 100.0)
    assert await visit("a", "a-2", 0.0) == 401, "lifted to the usage of the active tenant"
    with limiter.episodes.request(account("job", "c"), "c-1"):  # it waits for its version
        lifted = limiter.usage("c")
        for number in range(3):
            now[0] += 2 * OPEN_S
            await visit("b", f"b-{number}", 100.0)
        assert limiter.usage("c") == lifted
        assert len(limiter.episodes) == 2, "those that ended long ago are closed"


async def test_a_place_whose_owner_gave_up_goes_to_the_next():
    limiter, entered, leave = RequestLimiter(1), list[str](), asyncio.Event()
    names = ("first", "gone while waiting", "gone when called", "last")
    visits = [asyncio.ensure_future(enter(limiter, entered, name, leave)) for name in names]
    await asyncio.sleep(0)
    visits[1].cancel()
    await asyncio.sleep(0)
    visits[0].cancel()
    visits[2].cancel()
    leave.set()
    await asyncio.gather(*visits, return_exceptions=True)
    assert entered == ["first", "last"]
    async with limiter.place(account("after all"), 1, 0):
        assert limiter.num_waiting == 0


async def test_a_lone_request_waits_for_the_others_and_admits_none_until_it_ends_or_is_cancelled():
    limiter, seen = RequestLimiter(4), []
    first, lone = asyncio.Event(), asyncio.Event()

    async def run_alone():
        with limiter.episodes.request(account("job"), "episode"):
            async with limiter.alone(account("job")) as place:
                seen.append("lone")
                place.cost = 30.0
                await lone.wait()

    async with asyncio.TaskGroup() as group:
        for work in (enter(limiter, seen, "first", first), run_alone(), enter(limiter, seen, "later", first)):
            group.create_task(work)
            await asyncio.sleep(0)
        assert seen == ["first"]
        first.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert seen == ["first", "lone"]
        lone.set()
    assert seen == ["first", "lone", "later"]
    assert limiter.usage("team-a") == 30.0
    async with limiter.place(account("job"), 1, 0):
        gives_up = asyncio.create_task(run_alone())
        await asyncio.sleep(0)
        gives_up.cancel()
        await asyncio.wait({gives_up})
        async with limiter.place(account("job"), 1, 0):
            pass


async def test_a_request_queued_for_a_larger_cache_enters_the_empty_engine():
    """After a restart the engine may have fewer tokens than a queued request has reserved; it must not block the queue."""
    limiter, hold, entered = RequestLimiter(8, kv_tokens=512), asyncio.Event(), list[str]()
    async with asyncio.TaskGroup() as group:
        group.create_task(enter(limiter, entered, "first", hold, 32))
        await asyncio.sleep(0)
        group.create_task(enter(limiter, entered, "large", hold, 512))
        await asyncio.sleep(0)
        limiter.set_kv_tokens(256)
        assert entered == ["first"]
        hold.set()
    assert entered == ["first", "large"]


def test_a_reservation_is_whole_blocks_within_the_budget():
    budget = KvBudget(1, 1000)
    assert [budget.size(tokens) for tokens in (0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 5000)] == [0, 32, 32, 64, 1000]
    budget.take(32)
    assert budget.room < 0, "there is no sequence left"
    budget.give_back(32)
    assert budget.room == math.inf


class Prompts:
    """Requests with prompts, of two tenants. inside: those that have a place, with what ends them and what begins them."""

    def __init__(self):
        self.limiter = RequestLimiter(100, kv_tokens=100_000)
        self.limiter.prefill.step_tokens = 100
        self.inside: dict[str, Place] = {}
        self.over = asyncio.Event()

    async def run(self, name, num_prompt):
        async with self.limiter.place(account("job", name[0]), num_prompt, 10, num_prompt + 10) as place:
            self.inside[name] = place
            await self.over.wait()

    async def ask(self, *names, num_prompt):
        tasks = [asyncio.create_task(self.run(name, num_prompt), name=name) for name in names]
        await self.settle()
        return tasks

    async def settle(self):
        for _ in range(5):
            await asyncio.sleep(0)

    async def begin(self, name):
        self.inside[name].begin()
        self.inside[name].begin()  # an engine may report the first token twice
        await self.settle()


async def test_prompts_of_one_tenant_wait_for_their_share_of_a_step_and_others_pass_them():
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
