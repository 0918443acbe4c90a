"""Paging in a simulated pool whose agents outnumber its slots."""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from marlaas_worker.rollout.paging import PageDemand, PagePlan, Resident, Urgency, Wait, order_waits, plan_pages
from marlaas_worker.rollout.reload_pace import MAX_RELOAD_SHARE, ReloadPace


@dataclass
class Agent:
    """An agent of the simulated pool: `members` episodes at a time, each of three turns with a tool call after it."""

    name: str
    tenant: str
    members: int
    is_strict: bool
    version: int = 0
    num_ended: int = 0

    @property
    def newest(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass
class Pool:
    """A simulated replica. Its clock jumps from event to event; every 16 episodes make a new version of an agent."""

    seed: int
    num_slots: int
    agents: list[Agent]
    now: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    slots: dict[str, Resident] = field(default_factory=dict)
    waits: dict[str, tuple[Wait, list[Callable[[], None]]]] = field(default_factory=dict)
    yielding: frozenset[str] = frozenset()
    proven: set[str] = field(default_factory=set)
    usage: Counter[str] = field(default_factory=Counter)
    mean_load_s: float = 0.02
    failures: float = 0.0
    served: set[str] = field(default_factory=set)
    is_short: bool = False
    busy_reload_s: float = 0.0
    longest_wait_s: float = 0.0
    review_at: float = float("inf")
    order: "count[int]" = field(default_factory=count)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.pace = ReloadPace()
        for agent in self.agents:
            for _ in range(agent.members):
                self.after(self.random.uniform(0, 5), lambda agent=agent: self.turn(agent, agent.newest, 0))  # type: ignore[misc]

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), event))

    def run(self, seconds: float) -> None:
        while (at := min(self.review_at, self.events[0][0] if self.events else math.inf)) <= seconds:
            self.now = at
            if self.review_at > at:
                heapq.heappop(self.events)[2]()
            else:
                self.review()

    def turn(self, agent: Agent, version: str, number: int) -> None:
        """Request a turn; it waits for its version if that has no slot, or yields."""
        slot = self.slots.get(version)
        if slot is None or not slot.is_ready or version in self.yielding:
            _, requests = self.waits.setdefault(version, (Wait(version, agent.tenant, self.now), []))
            requests.append(lambda: self.turn(agent, version, number))
            self.review_at = self.now
            return
        assert version in self.proven
        self.served.add(version)
        self.change(version, num_running=slot.num_running + 1)
        self.after(self.random.uniform(0.05, 0.6), lambda: self.end_turn(agent, version, number))

    def end_turn(self, agent: Agent, version: str, number: int) -> None:
        self.change(version, num_running=self.slots[version].num_running - 1)
        self.wake(version)
        self.usage[agent.tenant] += self.random.randint(10, 60)
        tool_s = self.random.lognormvariate(math.log(0.4), 0.5)
        if number < 2:
            self.after(tool_s, lambda: self.turn(agent, version, number + 1))
            return
        agent.num_ended += 1
        if agent.num_ended % 16 == 0:
            agent.version += 1
            self.review_at = self.now
        train_s = self.random.uniform(1, 8) if agent.is_strict and agent.num_ended % agent.members == 0 else 0.0
        self.after(tool_s + train_s, lambda: self.turn(agent, agent.newest, 0))

    def wake(self, version: str) -> None:
        """After a request, review only when the role does (`ProvenVersions.hold`)."""
        is_needed = bool(self.waits) or self.is_short or version in self.yielding
        if is_needed and not self.slots[version].num_running:
            self.review_at = self.now

    def review(self) -> None:
        newest = {agent.newest: agent for agent in self.agents}
        residents = [
            replace(
                one,
                is_current=one.name in newest,
                is_strict=self.agent(one.name).is_strict,
                usage=self.usage[self.tenant(one.name)],
                has_served=one.name in self.served,
                is_yielding=one.name in self.yielding,
            )
            for one in self.slots.values()
        ]
        waits = order_waits([wait for wait, _ in self.waits.values()], self.usage.__getitem__)
        wanted = {wait.name: Urgency.WAITING for wait in waits}
        for name in newest:
            wanted.setdefault(name, Urgency.PREFETCH if name in self.proven else Urgency.SUCCESSOR)
        demands = [
            PageDemand(name, urgency, name in self.served, self.usage[self.tenant(name)])
            for name, urgency in wanted.items()
            if name not in self.slots
        ]
        found = plan_pages(self.num_slots, residents, demands, self.pace, self.now)
        self.review_at = self.now + min(
            3.0, max(0.01, found.review_s)
        )  # the role reviews every three seconds in any case
        self.apply(found)

    def apply(self, found: PagePlan) -> None:
        for name in found.evict:
            slot = self.slots.pop(name)
            assert slot.is_ready
            assert slot.num_running == 0
        for name in found.expected:
            self.pace.expect(name, self.now)
        for name in found.load:
            assert name not in self.slots
            self.slots[name] = Resident(name, self.now, self.now, is_ready=False)
            is_free = not any(one.num_running for one in self.slots.values())
            load_s = self.random.lognormvariate(math.log(self.mean_load_s) - 0.125, 0.5)
            self.after(load_s, lambda name=name, load_s=load_s, is_free=is_free: self.loaded(name, load_s, is_free))  # type: ignore[misc]
        assert len(self.slots) <= self.num_slots
        self.yielding, self.is_short = found.yielding, found.is_short
        for name in [name for name in self.waits if name not in self.yielding]:
            if name in self.slots and self.slots[name].is_ready:
                self.serve(name)

    def loaded(self, name: str, load_s: float, is_free: bool) -> None:
        self.review_at = self.now
        if self.random.random() < self.failures:
            del self.slots[name]
            return
        self.pace.note(name, load_s, self.now, is_reload=name in self.served, is_free=is_free)
        self.busy_reload_s += load_s if name in self.served and not is_free else 0.0
        self.proven.add(name)
        self.change(name, is_ready=True)

    def serve(self, name: str) -> None:
        wait, requests = self.waits.pop(name)
        self.longest_wait_s = max(self.longest_wait_s, self.now - wait.since)
        for request in requests:
            request()

    @property
    def oldest_wait_s(self) -> float:
        """The longest time for which a version was or is waited for."""
        return max([self.longest_wait_s, *(self.now - wait.since for wait, _ in self.waits.values())])

    def change(self, name: str, **changes: Any) -> None:
        self.slots[name] = replace(self.slots[name], **{"used_at": self.now, **changes})

    def tenant(self, name: str) -> str:
        return self.agent(name).tenant

    def agent(self, name: str) -> Agent:
        return next(agent for agent in self.agents if name.startswith(f"{agent.name}@"))


class PoolOfStrictJobs(Pool):
    """All agents are of strict jobs: the episodes of a step start together, and the next step starts when they have ended and were trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.events.clear()
        self.num_open: dict[str, int] = {}
        for agent in self.agents:
            self.after(self.random.uniform(0, 2), lambda agent=agent: self.begin(agent))  # type: ignore[misc]

    def begin(self, agent: Agent) -> None:
        self.num_open[agent.name] = agent.members
        for _ in range(agent.members):
            self.after(self.random.uniform(0, 0.1), lambda: self.turn(agent, agent.newest, 0))

    def end_turn(self, agent: Agent, version: str, number: int) -> None:
        self.change(version, num_running=self.slots[version].num_running - 1)
        self.wake(version)
        self.usage[agent.tenant] += self.random.randint(10, 60)
        if number < 2 and self.random.random() < 0.5:
            tool_s = self.random.lognormvariate(math.log(0.4), 0.5)
            self.after(tool_s, lambda: self.turn(agent, version, number + 1))
            return
        self.num_open[agent.name] -= 1
        if not self.num_open[agent.name]:
            self.after(self.random.uniform(0.2, 0.6), lambda: self.commit(agent))

    def commit(self, agent: Agent) -> None:
        agent.version += 1
        self.review_at = self.now
        self.after(0.05, lambda: self.begin(agent))


@pytest.mark.parametrize("failures", [0.0, 0.5])
def test_32_strict_jobs_on_16_slots_advance_alike_also_if_loads_fail(failures: float) -> None:
    """If new versions drove out those in use, whose re-loads are limited, some steps would wait for a minute, while other jobs go on."""
    agents = [Agent(f"agent-{number}", f"tenant-{number % 4}", 8, is_strict=True) for number in range(32)]
    pool = PoolOfStrictJobs(0, 16, agents, mean_load_s=0.06, failures=failures)
    pool.run(60)
    steps = [agent.version for agent in agents]
    assert min(steps) >= 0.6 * max(steps)
    assert pool.oldest_wait_s < (15 if failures else 12)
    assert pool.pace.num_loads > sum(steps), "versions take turns on the slots"
    assert pool.busy_reload_s <= MAX_RELOAD_SHARE * pool.now


def test_32_agents_on_6_slots_all_proceed_and_reloads_take_at_most_two_percent() -> None:
    chosen = random.Random(1)
    agents = [
        Agent(f"agent-{number}", f"tenant-{number % 4}", chosen.randint(1, 8), is_strict=chosen.random() < 0.3)
        for number in range(32)
    ]
    pool = Pool(1, 6, agents)
    pool.run(400)
    assert pool.pace.num_reloads > 20, "it pages"
    assert pool.busy_reload_s <= MAX_RELOAD_SHARE * pool.now
    most_waiting = 3 * len(agents)  # an agent has up to three versions in use, and each may wait for a re-load
    assert pool.oldest_wait_s <= most_waiting * pool.pace.quantum_s + 10
    assert max(pool.usage.values()) <= 1.05 * min(pool.usage.values()), "tenants share the slots too"
    assert min(agent.num_ended for agent in agents) > 0
