"""Admission over simulated time: jobs arrive, run for a while, and end. Shares at saturation, and a tenant with a hundred jobs."""

import heapq
import random
from dataclasses import dataclass, field

from tests.orchestrator.demands import demand, order_of

from marlaas_worker.orchestrator.capacity import JobDemand
from marlaas_worker.orchestrator.preemption import RunningJob, preemptions
from marlaas_worker.orchestrator.shares import PastUse

TICK_S = 5.0


@dataclass
class Simulation:
    """One pool. Preempted jobs keep the time that they have run. preempts: whether running jobs make room."""

    total: int
    weights: dict[str, float]
    preempts: bool = True
    now: float = 0.0
    past: PastUse = field(default_factory=PastUse)
    left_s: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, JobDemand] = field(default_factory=dict)
    running: dict[str, RunningJob] = field(default_factory=dict)
    arrivals: list[tuple[float, str, JobDemand, float]] = field(default_factory=list)
    started_at: dict[str, float] = field(default_factory=dict)
    held_s: dict[str, float] = field(default_factory=dict)

    def arrive_at(self, at: float, name: str, tenant: str, run_s: float, units: int = 1) -> None:
        heapq.heappush(self.arrivals, (at, name, demand(name, tenant, units, created_at=at), run_s))

    def step(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now:
            _, _, job, run_s = heapq.heappop(self.arrivals)
            self.waiting[job.uid], self.left_s[job.uid] = job, run_s
        held = [one.demand for one in self.running.values()]
        order, admitted = order_of({"tiny": self.total}, held, self.weights, self.past)
        order.run(self.waiting.values())
        for one in admitted:
            self._start(one)
        for found in preemptions(order, self.running.values(), self.now) if self.preempts else ():
            for victim in found.victims:
                del self.running[victim.uid]
                self.waiting[victim.uid] = victim
                self.past.refund(victim.tenant, sum(victim.need.values()) / self.total)
            self._start(found.preemptor)
        self._run()

    def _start(self, job: JobDemand) -> None:
        del self.waiting[job.uid]
        self.running[job.uid] = RunningJob(job, self.now)
        self.started_at.setdefault(job.document.job, self.now)
        self.past.enter(job.tenant, sum(job.need.values()) / self.total)

    def _run(self) -> None:
        self.now += TICK_S
        shares: dict[str, float] = {}
        for uid, one in list(self.running.items()):
            units = sum(one.demand.need.values())
            shares[one.demand.tenant] = shares.get(one.demand.tenant, 0.0) + units / self.total
            self.held_s[one.demand.tenant] = self.held_s.get(one.demand.tenant, 0.0) + units * TICK_S
            self.left_s[uid] -= TICK_S
            if self.left_s[uid] <= 0:
                del self.running[uid]
        self.past.advance(self.now, shares)
        assert sum(shares.values()) <= 1 + 1e-9

    def run_until(self, at: float) -> None:
        while self.now < at:
            self.step()


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def saturated(total: int, run_s: float, preempts: bool = True, seed: int = 0) -> Simulation:
    """Four tenants of weights 1, 1, 2 and 4, each with more jobs than fit, submitted in a random order."""
    draw, weights = random.Random(seed), {"a": 1.0, "b": 1.0, "c": 2.0, "d": 4.0}
    found = Simulation(total, weights, preempts)
    for number in range(120):
        found.arrive_at(draw.uniform(0, 600), f"j{number:03d}", draw.choice("abcd"), draw.uniform(0.5, 1.5) * run_s)
    for number in range(120):
        found.arrive_at(0.0, f"k{number:03d}", "abcd"[number % 4], draw.uniform(0.5, 1.5) * run_s)
    return found


def test_at_saturation_shares_follow_the_weights():
    for total, preempts in ((8, True), (16, False)):
        found = saturated(total, 60.0 * total, preempts)
        found.run_until(800.0)
        before = dict(found.held_s)
        found.run_until(1900.0)
        gained = [(found.held_s[one] - before[one]) / weight for one, weight in found.weights.items()]
        assert all(any(job.tenant == one for job in found.waiting.values()) for one in found.weights), "saturated"
        assert jain(gained) >= 0.95, (total, preempts, gained)


def test_a_hundred_jobs_at_once_delay_another_tenants_job_by_no_more_than_a_minimum_run_time():
    found = Simulation(16, {})
    for number in range(100):
        found.arrive_at(0.0, f"many{number:03d}", "attacker", 3600.0)
    found.arrive_at(10.0, "early", "victim", 600.0)
    found.arrive_at(500.0, "late", "victim", 600.0)
    found.run_until(700.0)
    assert found.started_at["early"] - 10.0 <= 60.0 + TICK_S
    assert found.started_at["late"] - 500.0 <= TICK_S


def test_a_tenant_that_comes_and_goes_with_short_jobs_gains_nothing():
    """Its share is zero whenever it comes; its past use and its entries are not."""
    found = Simulation(1, {}, preempts=False)
    for number in range(200):
        found.arrive_at(number * 20.0, f"short{number:03d}", "comes-and-goes", 10.0)
        found.arrive_at(number * 20.0, f"steady{number:03d}", "steady", 10.0)
    found.run_until(2000.0)
    held = found.held_s
    assert jain([held["comes-and-goes"], held["steady"]]) >= 0.99
