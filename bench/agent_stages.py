"""Agents of one job whose stages take simulated time: shared on demand against fixed parts, and a pipeline against a barrier.

The orchestrator is the real process, on a real nats-server; rollout replicas and trainers are the product's roles, whose
engines and micro-batches sleep (`simulated_pool`). Sandboxes are simulated and request their turns with the product's client.

demand: four agents that generate 8, 4, 2 and 1 parts of the tokens. shared: one engine and one trainer for all. fixed: an
engine and a trainer of a quarter of the speed for each agent, as pools of their own. Strict.

balance: the same agents on two replicas of one pool. off: agents of a job count the same when they are placed on replicas. on:
they count by their recent tokens. Trainers are fast. Asynchronous, because the agents speak in turn: in a strict step each
replica would wait for the other one's agents. Which agents share a replica when off depends on a hash of the job's
name, so each round is of another job.

pipeline: two agents that speak in turn, with a tool of log-normal time (median 0.5 s, σ 1) after each reply. barrier: no
episode is handed in before all of the step have ended, so that training begins after the whole rollout. Then as the
product does it: strict, and with maxStaleness 1.
"""

import asyncio
import contextlib
import itertools
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from bench.orchestrator_queue import start
from bench.replicas import add_roles, cancel
from bench.runs import print_table
from bench.simulated_pool import pool_of
from bench.simulated_sandboxes import POOL, Sandboxes, identity, place
from marlaas.models import prepare
from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.bus_nats import connect
from marlaas_api.messages import ChatMessage, Episode, GenerateRequest, StepRecord, TaskMessage
from marlaas_api.names import derive_seed, episode_id
from marlaas_api.nats_server import EmbeddedNats
from marlaas_api.wire import decode_as, encode
from marlaas_worker.rollout import reception
from marlaas_worker.sandbox.turns import LEASE_S, TurnClient

LOADS = {"a": 8, "b": 4, "c": 2, "d": 1}
"""Parts of the generated tokens, by agent."""
PART_TOKENS, GROUP_SIZE, GROUPS = 12, 4, 4
MICROBATCH = 512
"""Tokens of a micro-batch; a group has about 240 of an agent in `pipeline`, and fewer in the others."""
MEDIAN_S, SIGMA = 0.5, 1.0
TARGETS = {"demand": (1.4, 2.0), "balance": (1.2, 1.4), "strict": (1.1, 1.2), "async": (1.4, 1.57)}
HEADERS = ["round", "mode", "steps", "seconds per step"]
_START_S, _TURN_S, _POLL_S = 300.0, 3600.0, 0.5


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run the job.

    agents: number of tokens of an agent's turns. replicas: of each pool. is_even: agents of a job count the same.
    speeds: of an engine and of a trainer, tokens/s. fixed: a pool for each agent. barrier: see the module. tools: whether a tool runs after each reply.
    """

    name: str
    agents: Mapping[str, int]
    speeds: tuple[float, float]
    staleness: int = 0
    fixed: bool = False
    barrier: bool = False
    tools: bool = False
    replicas: int = 1
    is_even: bool = False
    microbatch: int = MICROBATCH

    def pools(self) -> dict[str, str]:
        """Return the pool of each agent."""
        return {name: f"{POOL}-{name}" if self.fixed else POOL for name in self.agents}

    def spec(self) -> dict[str, Any]:
        """Return the job's spec."""
        own = self.pools()
        agents = [{"name": name} | ({"poolRef": {"name": own[name]}} if self.fixed else {}) for name in self.agents]
        training = {"steps": 100_000, "groupsPerStep": GROUPS, "maxStaleness": self.staleness, "maxRefill": 0}
        return {
            "poolRef": {"name": own[next(iter(own))]},
            "agents": agents,
            "environment": {"name": "team:play"},
            "rollout": {"groupSize": GROUP_SIZE, "maxTokens": max(self.agents.values())},
            "training": training | {"microbatchTokens": self.microbatch},
            "evaluation": {"tasks": 0},
        }


def demand(engine_speed: float = 768.0, trainer_speed: float = 768.0) -> list[Mode]:
    """Return the modes of the part `demand`: fixed parts, then shared."""
    tokens = {name: PART_TOKENS * load for name, load in LOADS.items()}
    quarter = engine_speed / len(LOADS), trainer_speed / len(LOADS)
    return [Mode("fixed", tokens, quarter, fixed=True), Mode("shared", tokens, (engine_speed, trainer_speed))]


def balance(engine_speed: float = 192.0) -> list[Mode]:
    """Return the modes of the part `balance`: off, then on."""
    tokens, speeds = {name: PART_TOKENS * load for name, load in LOADS.items()}, (engine_speed, 1e6)
    return [
        Mode("off", tokens, speeds, staleness=1, replicas=2, is_even=True),
        Mode("on", tokens, speeds, staleness=1, replicas=2),
    ]


def pipeline(engine_speed: float = 1024.0, trainer_speed: float = 512.0) -> list[Mode]:
    """Return the modes of the part `pipeline`: the barrier first."""
    tokens, speeds = {"a": 48, "b": 48}, (engine_speed, trainer_speed)
    part = 128  # less than a group: a micro-batch of several groups would wait for all of them
    return [
        Mode("barrier", tokens, speeds, barrier=True, tools=True, microbatch=part),
        Mode("strict", tokens, speeds, tools=True, microbatch=part),
        Mode("async", tokens, speeds, staleness=1, tools=True, microbatch=part),
    ]


@dataclass(kw_only=True)
class TeamSandboxes(Sandboxes):
    """Sandboxes whose episodes are one turn of each agent: at the same time, or with tools one after the other."""

    client: TurnClient
    mode: Mode
    _held: list[Episode] = field(default_factory=list)

    async def play(self, task: TaskMessage) -> None:
        await asyncio.gather(*(self._play(task, member) for member in range(task.group_size)))

    async def _play(self, task: TaskMessage, member: int) -> None:
        requests = [self._request(task, member, at) for at in range(len(self.mode.agents))]
        if self.mode.tools:
            draw = random.Random(derive_seed(0, "tool", task.index, member))
            for request in requests:
                await self.client.generate(request, _TURN_S)
                await asyncio.sleep(tool_s(draw))
        else:
            await asyncio.gather(*(self.client.generate(request, _TURN_S) for request in requests))
        names = list(self.mode.agents)
        await self._hand_in(
            Episode(
                **identity(task),
                **task.model_dump(include={"group", "split", "index"}),
                member=member,
                episode=episode_id(task.group, member, 1),
                num_turns=len(names),
                rewards=dict.fromkeys(names, float(member)),
                leaves={name: (at,) for at, name in enumerate(names)},
            )
        )

    async def _hand_in(self, episode: Episode) -> None:
        """Publish an episode; behind a barrier, those of a step at once, when all have ended."""
        self._held.append(episode)
        if self.mode.barrier and len(self._held) < GROUP_SIZE * GROUPS:
            return
        ended, self._held = self._held, []
        for one in ended:
            await self.bus.publish(subjects.episode(one.namespace, one.job), encode(one))

    def _request(self, task: TaskMessage, member: int, at: int) -> GenerateRequest:
        name, tokens = list(self.mode.agents.items())[at]
        return GenerateRequest(
            **identity(task),
            agent=name,
            group=task.group,
            member=member,
            episode=episode_id(task.group, member, 1),
            turn=at,
            parent=None,
            append=(ChatMessage(role="user", content=f"{task.index:06}"),),
            max_tokens=tokens,
            deadline_s=LEASE_S,
        )


def tool_s(draw: random.Random) -> float:
    """Return the seconds of a tool: log-normal."""
    return MEDIAN_S * math.exp(draw.gauss(0.0, SIGMA))


@contextlib.asynccontextmanager
async def running(mode: Mode, folder: Path, job: int = 0) -> AsyncIterator[tuple[Bus, Callable[[], None]]]:
    """Run the job; yield the bus, and a function that raises the error of a role or of an episode that has failed."""
    model, own = prepare("tiny"), mode.pools()
    async with EmbeddedNats(folder / "nats") as server, contextlib.AsyncExitStack() as stack:
        bus = await connect(server.url, name="bench")
        stack.push_async_callback(bus.close)
        await bus.ensure()
        orchestrator = await start(server.url, folder)
        stack.push_async_callback(orchestrator.wait)
        stack.callback(orchestrator.kill)
        if mode.is_even:
            stack.enter_context(patch.object(reception, "_costs", lambda agents, loads, reports: loads))
        roles: list[asyncio.Task[None]] = []
        stack.push_async_callback(cancel, roles)
        for name, number in itertools.product(dict.fromkeys(own.values()), range(mode.replicas)):
            document = pool_of(model, len(own) * (mode.staleness + 2), name)
            await add_roles(f"{name}-{number}", document, mode.speeds, (server.url, folder), roles)
        client = await stack.enter_async_context(TurnClient(bus))
        sandboxes = TeamSandboxes(bus=bus, spec=mode.spec(), client=client, mode=mode)
        stack.push_async_callback(cancel, sandboxes.playing)
        await sandboxes.submit(job)
        reader = asyncio.create_task(sandboxes.take_tasks(job))
        stack.push_async_callback(cancel, [reader])

        def check() -> None:
            sandboxes.check()
            for task in (*roles, reader):
                if task.done():
                    task.result()

        yield bus, check


async def step_s(mode: Mode, num_steps: int, folder: Path, job: int = 0) -> float:
    """Return the mean seconds of so many steps, after two to begin with. job: its number."""
    async with running(mode, folder, job) as (bus, check):
        times: list[float] = []
        until = time.monotonic() + _START_S
        while len(times) < num_steps + 3:
            await asyncio.sleep(_POLL_S)
            stored = await bus.replay(subjects.STEPS, f"step.{'.'.join(place(job))}.*")
            times = [decode_as(StepRecord, one.data).at for one in stored]
            check()
            if not times and time.monotonic() > until:
                raise TimeoutError(f"{mode.name}: no step in {_START_S:g} s")
    return mean_step_s(times, num_steps)


def mean_step_s(times: Sequence[float], num_steps: int) -> float:
    """Return the mean seconds of a step. times: of the ends of steps, the first two of which do not count."""
    return (times[num_steps + 2] - times[2]) / num_steps


def measure(modes: Sequence[Mode], rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Run the modes in turns, print a row for each, and return the seconds per step by mode."""
    found: dict[str, list[float]] = {mode.name: [] for mode in modes}

    def rows() -> Any:
        for number, mode in itertools.product(range(rounds), modes):
            with tempfile.TemporaryDirectory() as folder:
                seconds = asyncio.run(step_s(mode, num_steps, Path(folder), number))
            found[mode.name].append(seconds)
            yield [number, mode.name, num_steps, f"{seconds:.2f}"]

    print_table(HEADERS, rows())
    return found


def told(name: str, slow: Sequence[float], fast: Sequence[float]) -> str:
    """Return a line with the ratio of two modes: the median of the rounds. name: of the target."""
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    must, aim = TARGETS[name]
    ratio = median(ratios)
    verdict = "missed" if ratio < must else "met" if ratio < aim else "met, also the aim"
    return f"{name}: {ratio:.2f}x (rounds: {', '.join(f'{one:.2f}' for one in ratios)}; must {must}x, aim {aim}x): {verdict}"


def run_demand(rounds: int, num_steps: int) -> None:
    """Measure the part `demand`."""
    found = measure(demand(), rounds, num_steps)
    print("\n" + told("demand", found["fixed"], found["shared"]), flush=True)


def run_balance(rounds: int, num_steps: int) -> None:
    """Measure the part `balance`."""
    found = measure(balance(), rounds, num_steps)
    print("\n" + told("balance", found["off"], found["on"]), flush=True)


def run_pipeline(rounds: int, num_steps: int) -> None:
    """Measure the part `pipeline`."""
    found = measure(pipeline(), rounds, num_steps)
    print("\n" + told("strict", found["barrier"], found["strict"]))
    print(told("async", found["barrier"], found["async"]), flush=True)
