"""Tenants that behave badly take no more of the engine than their share: the limiter and a simulated engine, in simulated time.

A well-behaved tenant always has more turns than its share holds. Whenever both tenants have requests in the queue, their services
may differ by the bound of `fair_queue`, whatever happened before.
"""

import asyncio
import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
from bench.fairness import KV_TOKENS, MAX_SEQS, Engine
from bench.virtual_time import VirtualLoop

from marlaas_worker.rollout.request_limiter import OPEN_S, Account, RequestLimiter
from marlaas_worker.rollout.served_jobs import RecentOutputs
from marlaas_worker.rollout.supervised_engine import EngineMeter

MAX_TOKENS, SECONDS = 128, 60.0


@dataclass(frozen=True)
class Behaviour:
    """What the episodes of a tenant do.

    prompt, output: largest numbers of tokens of a turn. hangs_s: after every third turn, an episode does nothing for so long.
    exits_s: an episode cancels its turns after so many seconds in the engine.
    """

    num_episodes: int = 48
    num_jobs: int = 4
    prompt: int = 100
    output: int = 60
    tool_s: float = 0.2
    hangs_s: float = 0.0
    exits_s: float | None = None


ATTACKS = {
    "a hundred jobs": Behaviour(num_episodes=200, num_jobs=100),
    "giant prompts": Behaviour(prompt=4000, output=10, tool_s=0.0),
    "hanging environments": Behaviour(num_episodes=300, hangs_s=OPEN_S - 10.0),
    "floods of turns": Behaviour(num_episodes=400, prompt=40, output=4, tool_s=0.0),
    "environments that exit": Behaviour(num_episodes=300, output=MAX_TOKENS, tool_s=0.0, exits_s=0.3),
}


class Run:
    """Two tenants of equal weight, `good` and `bad`, on one engine. served: computed tokens by tenant.

    worst: the largest difference of their services in a time in which both had queued requests.
    """

    def __init__(self, attack, is_fair):
        self.behaviours, self.is_fair = {"good": Behaviour(), "bad": attack}, is_fair
        self.clock = asyncio.get_running_loop().time
        self.engine, self.meter = Engine(), EngineMeter()
        self.limiter = RequestLimiter(MAX_SEQS, clock=self.clock, kv_tokens=KV_TOKENS)
        self.outputs = defaultdict(RecentOutputs)
        self.served, self.queued = Counter(), Counter()
        self.begin = None
        self.worst = self.largest = 0

    async def play(self, seconds):
        tasks = [asyncio.create_task(self.engine.run())]
        for tenant, behaviour in self.behaviours.items():
            for number in range(behaviour.num_episodes):
                tasks.append(asyncio.create_task(self.episodes(tenant, behaviour, number)))
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result

    async def episodes(self, tenant, behaviour, number):
        draw = random.Random(f"{tenant} {number}")
        job = f"{tenant}-{number % behaviour.num_jobs}"
        account = Account(tenant, 1.0, job) if self.is_fair else Account("all", 1.0, "all")
        for episode in itertools.count():
            for _ in range(3):
                prompt = draw.randint(behaviour.prompt // 2, behaviour.prompt)
                with self.limiter.episodes.request(account, f"{tenant}-{number}-{episode}"):
                    await self.turn(tenant, job, account, prompt, draw.randint(1, behaviour.output))
                await asyncio.sleep(behaviour.tool_s * draw.random())
            await asyncio.sleep(behaviour.hangs_s)

    async def turn(self, tenant, job, account, prompt, output):
        estimate = prompt + self.outputs[job].expected_tokens(MAX_TOKENS)
        self.change(tenant, 1)
        is_queued = True
        try:
            async with self.limiter.place(account, prompt, estimate - prompt, estimate) as place:
                self.change(tenant, -1)
                is_queued = False
                place.cost = await self.generate(tenant, prompt, output, place, estimate)
        finally:
            if is_queued:
                self.change(tenant, -1)
        self.outputs[job].note(output)

    async def generate(self, tenant, prompt, output, place, estimate):
        began = self.clock()
        try:
            async with asyncio.timeout(self.behaviours[tenant].exits_s):
                await self.engine.generate(prompt, output, place.begin)
        except TimeoutError:
            self.note(tenant, prompt + output - self.engine.left, estimate)
            return self.meter.unfinished(prompt, self.clock() - began, MAX_TOKENS).cost
        self.meter.decode.note(self.clock() - began, output)
        self.note(tenant, prompt + output, estimate)
        return prompt + output

    def note(self, tenant, computed, estimate):
        self.served[tenant] += computed
        self.largest = max(self.largest, computed, estimate)
        self.check()

    def change(self, tenant, number):
        self.queued[tenant] += number
        self.check()

    def check(self):
        """Begin or end a time in which both have queued requests, and note the difference since its begin."""
        if not (self.queued["good"] and self.queued["bad"]):
            self.begin = None
            return
        self.begin = self.begin or dict(self.served)
        grown = {tenant: self.served[tenant] - self.begin.get(tenant, 0) for tenant in self.behaviours}
        self.worst = max(self.worst, grown["bad"] - grown["good"])

    @property
    def bound(self):
        """(C + 2E + P)(1/w_f + 1/w_g) + max_credit/W. What is in the engine is counted here at its end only: one more KV cache."""
        in_flight = KV_TOKENS
        return 2 * (self.largest + in_flight + KV_TOKENS) + KV_TOKENS / 2


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attacker_gets_no_more_than_the_bound_while_the_other_tenant_waits(attack):
    async def attacked(is_fair):
        made = Run(ATTACKS[attack], is_fair)
        await made.play(SECONDS)
        return made

    for is_fair in (True, False):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            run = runner.run(attacked(is_fair))
        assert (run.worst <= run.bound) is is_fair
