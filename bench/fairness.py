"""Room in an engine by weight against first come, first served: four tenants with weights 1:1:2:4, in simulated time.

The product's `RequestLimiter` decides who enters a simulated engine: at most 32 sequences and 8,192 tokens of KV cache,
whose step takes longer with more sequences and prompt tokens. Turns of all tenants have the same
sizes, so that tokens a second compare; tenants differ in their number of jobs, and two of them come and go. Episodes have
three turns with log-normal tool waits. First come, first served is the same limiter with all
requests in one account. Service is tokens: prompts and outputs. Compared are windows of 60 s, and in each the tenants that
had queued requests throughout: their shares of the service (Jain's index of service / weight, 1 is fair) and the
largest difference of service / weight. `bench multitenant --weights` measures the same on the real engine.
"""

import argparse
import asyncio
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from bench import options
from bench.multitenant_figures import jain
from bench.runs import table
from bench.virtual_time import VirtualLoop
from marlaas_worker.rollout.engine import Began, unheard
from marlaas_worker.rollout.request_limiter import Account, RequestLimiter
from marlaas_worker.rollout.served_jobs import RecentOutputs

MAX_SEQS, KV_TOKENS = 32, 8192
STEP_S, SEQUENCE_S, PROMPT_TOKEN_S = 0.006, 0.0004, 2e-5
TURNS, TOOL_S, SIGMA = 3, 0.4, 0.5
PROMPT, OUTPUT, MAX_TOKENS, WINDOW_S = (20, 200), 50.0, 128, 60.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. absent_s: pause after each `PRESENT_S`; 0: none."""

    name: str
    weight: float
    jobs: int
    absent_s: float = 0.0


TENANTS = (
    Tenant("greedy", 1.0, 24),
    Tenant("small", 1.0, 4, absent_s=75.0),
    Tenant("medium", 2.0, 6),
    Tenant("large", 4.0, 10, absent_s=60.0),
)
EPISODES, PRESENT_S = 8, 150.0
ORDERS = {"by weight": True, "first come, first served": False}
"""Orders of service, and whether they are fair."""


@dataclass(slots=True)
class Log:
    """What happened. served: time, tenant and tokens of each ended turn. idle: by tenant, begin and end of the times without a queued request."""

    served: list[tuple[float, str, int]] = field(default_factory=list)
    idle: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Window:
    """Service / weight of each tenant that had queued requests during the whole window."""

    services: dict[str, float]

    @property
    def difference(self) -> float:
        """Largest difference between two tenants."""
        return max(self.services.values()) - min(self.services.values())


def windows(log: Log, weights: dict[str, float], end: float) -> list[Window]:
    """Return the windows in which at least two tenants had queued requests throughout."""
    found = []
    for number in range(int(end // WINDOW_S)):
        begin, stop = number * WINDOW_S, (number + 1) * WINDOW_S
        busy = [
            name for name in weights if not any(first < stop and last > begin for first, last in log.idle.get(name, ()))
        ]
        tokens = dict.fromkeys(busy, 0.0)
        for at, tenant, cost in log.served:
            if begin <= at < stop and tenant in tokens:
                tokens[tenant] += cost / weights[tenant]
        if len(busy) > 1:
            found.append(Window(tokens))
    return found


@dataclass(slots=True)
class Engine:
    """Continuous batching: each step gives every sequence one token. left: tokens that the last request to end has not got."""

    running: dict[int, tuple[int, "asyncio.Future[None]"]] = field(default_factory=dict)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    prompt_tokens: int = 0
    begins: list[Began] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)
    left: int = 0

    async def generate(self, prompt: int, output: int, began: Began = unheard) -> None:
        number, done = next(self.numbers), asyncio.get_running_loop().create_future()
        self.running[number] = output, done
        self.prompt_tokens += prompt
        self.begins.append(began)
        self.entered.set()
        try:
            await done
        finally:
            self.left, _ = self.running.pop(number, (0, done))

    async def run(self) -> None:
        while True:
            await self.entered.wait()
            seconds = STEP_S + SEQUENCE_S * len(self.running) + PROMPT_TOKEN_S * self.prompt_tokens
            begins, self.begins, self.prompt_tokens = self.begins, [], 0
            await asyncio.sleep(seconds)
            for began in begins:
                began()
            for number, (left, done) in list(self.running.items()):
                self.running[number] = left - 1, done
                if left == 1:
                    del self.running[number]
                    if not done.done():
                        done.set_result(None)
            if not self.running:
                self.entered.clear()


class Simulation:
    """One run. fair: by tenant and weight, else first come, first served."""

    def __init__(self, fair: bool, seed: int) -> None:
        self.log = Log()
        self._fair, self._seed = fair, seed
        self._engine = Engine()
        self._limiter = RequestLimiter(MAX_SEQS, clock=asyncio.get_running_loop().time, kv_tokens=KV_TOKENS)
        self._outputs: defaultdict[str, RecentOutputs] = defaultdict(RecentOutputs)
        self._queued = dict.fromkeys((tenant.name for tenant in TENANTS), 0)
        self._idle_since = dict.fromkeys(self._queued, 0.0)

    async def run(self, seconds: float) -> Log:
        players = [
            self._play(tenant, job, number)
            for tenant in TENANTS
            for job in range(tenant.jobs)
            for number in range(EPISODES)
        ]
        tasks = [asyncio.create_task(one) for one in (self._engine.run(), *players)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for tenant in TENANTS:
            self._count(tenant.name, 0)
        return self.log

    async def _play(self, tenant: Tenant, job: int, number: int) -> None:
        """Play episodes, one after another, with the same sizes and waits in either order of service."""
        draw = random.Random(f"{self._seed} {tenant.name} {job} {number}")
        clock, began = asyncio.get_running_loop().time, 0.0
        for episode in itertools.count():
            if tenant.absent_s and clock() - began > PRESENT_S:
                await asyncio.sleep(tenant.absent_s)
                began = clock()
            for _ in range(TURNS):
                prompt = draw.randint(*PROMPT)
                output = max(1, min(MAX_TOKENS, round(OUTPUT * math.exp(draw.gauss(0.0, SIGMA)))))
                await self._turn(tenant, f"{tenant.name}-{job}", f"{job}-{number}-{episode}", (prompt, output))
                await asyncio.sleep(TOOL_S * math.exp(draw.gauss(0.0, SIGMA)))

    async def _turn(self, tenant: Tenant, job: str, episode: str, size: tuple[int, int]) -> None:
        prompt, output = size
        account = Account(tenant.name, tenant.weight, job) if self._fair else Account("all", 1.0, "all")
        expected = self._outputs[job].expected_tokens(MAX_TOKENS)
        self._count(tenant.name, 1)
        with self._limiter.episodes.request(account, f"{tenant.name}-{episode}"):
            async with self._limiter.place(account, prompt, expected, prompt + expected) as place:
                self._count(tenant.name, -1)
                await self._engine.generate(prompt, output)
                place.cost = prompt + output
        self._outputs[job].note(output)
        self.log.served.append((asyncio.get_running_loop().time(), tenant.name, prompt + output))

    def _count(self, tenant: str, change: int) -> None:
        now = asyncio.get_running_loop().time()
        if not self._queued[tenant] and now > self._idle_since[tenant]:
            self.log.idle.setdefault(tenant, []).append((self._idle_since[tenant], now))
        self._queued[tenant] += change
        self._idle_since[tenant] = now


def simulate(fair: bool, seed: int, seconds: float) -> Log:
    async def run() -> Log:
        return await Simulation(fair, seed).run(seconds)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def report(logs: dict[str, Log], weights: dict[str, float], seconds: float) -> str:
    """Return the table: a row for each order of service."""
    rows = []
    for name, log in logs.items():
        found = windows(log, weights, seconds)
        rows.append([name, f"{rate(log, seconds):.0f}", len(found), *(_compared(found) if found else [""] * 3)])
    head = ["order", "tokens/s", "windows", "difference of service / weight, max / mean", "Jain, mean", "Jain, least"]
    return table(head, rows)


def _compared(found: list[Window]) -> list[str]:
    differences = [window.difference for window in found]
    indices = [jain(list(window.services.values())) for window in found]
    return [f"{max(differences):.0f} / {fmean(differences):.0f}", f"{fmean(indices):.3f}", f"{min(indices):.3f}"]


def rate(log: Log, seconds: float) -> float:
    """Return the tokens per second of all tenants."""
    return sum(cost for at, _, cost in log.served if at < seconds) / seconds


def main(words: Sequence[str] = ()) -> None:
    parser = options("fairness", __doc__)
    parser.add_argument("--seconds", type=float, default=1200.0, help="simulated time; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    chosen: argparse.Namespace = parser.parse_args(words)
    weights = {tenant.name: tenant.weight for tenant in TENANTS}
    logs = {name: simulate(fair, chosen.seed, chosen.seconds) for name, fair in ORDERS.items()}
    print(report(logs, weights, chosen.seconds))
