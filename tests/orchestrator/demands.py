"""Synthetic jobs for tests of admission: a demand of any size, and admissions over pools of one resource: a round, or many over simulated time."""

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tests.harness import job_document

from marlaas_api.messages import JobDocument
from marlaas_worker.orchestrator.capacity import SLOTS, JobDemand, Space
from marlaas_worker.orchestrator.fair_order import FairOrder, Holdings, PastUse
from marlaas_worker.orchestrator.preemption import MIN_RUN_S, RunningJob, preemptions

SPEC = job_document("sums").spec
TICK_S = 5.0


def demand(
    name: str,
    tenant: str,
    units: int = 1,
    *,
    created_at: float = 0.0,
    priority: int = 0,
    pool: str = "tiny",
    also: str = "",
) -> JobDemand:
    """A job that needs this many adapter slots of a pool, and as many of the pool `also`."""
    spec = SPEC.model_copy(update={"priority": priority})
    place = {"namespace": f"{tenant}-1", "job": name, "uid": f"{tenant}-{name}", "tenant": tenant, "pool": pool}
    document = JobDocument(**place, created_at=created_at, spec=spec)
    return JobDemand(document, {(name, SLOTS): units for name in (pool, also) if name})


def order_of(
    totals: Mapping[str, int],
    holding: Iterable[JobDemand] = (),
    weights: Mapping[str, float] | None = None,
    past: PastUse | None = None,
    over_quota: Iterable[JobDemand] = (),
) -> tuple[FairOrder, list[JobDemand]]:
    """A round of admissions, and the list to which it adds the admitted jobs. totals: slots by pool."""
    amounts = {(pool, SLOTS): units for pool, units in totals.items()}
    held, known, refused = list(holding), weights or {}, list(over_quota)
    admitted: list[JobDemand] = []
    weight, is_refused = lambda tenant: known.get(tenant, 1.0), lambda one: one in refused
    holdings = Holdings(amounts, known, held)
    order = FairOrder(Space(amounts, held), holdings, past or PastUse(), weight, is_refused, admitted.append)
    return order, admitted


def names(demands: Iterable[JobDemand]) -> list[str]:
    return [one.document.job for one in demands]


@dataclass
class Simulation:
    """One pool. Preempted jobs keep the time that they have run.

    preempts: whether running jobs make room. remembers: whether past use counts.
    """

    total: int
    weights: dict[str, float]
    preempts: bool = True
    remembers: bool = True
    now: float = 0.0
    past: PastUse = field(default_factory=PastUse)
    left_s: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, JobDemand] = field(default_factory=dict)
    running: dict[str, RunningJob] = field(default_factory=dict)
    arrivals: list[tuple[float, str, JobDemand, float]] = field(default_factory=list)
    started_at: dict[str, float] = field(default_factory=dict)
    held_s: dict[str, float] = field(default_factory=dict)
    changes: list[tuple[str, set[str]]] = field(default_factory=list)
    """Each job that began, and those that made room for it."""

    def arrive_at(self, at: float, name: str, tenant: str, run_s: float, **fields: int) -> None:
        heapq.heappush(self.arrivals, (at, name, demand(name, tenant, created_at=at, **fields), run_s))

    def step(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now:
            _, _, job, run_s = heapq.heappop(self.arrivals)
            self.waiting[job.uid], self.left_s[job.uid] = job, run_s
        held = [one.demand for one in self.running.values()]
        order, admitted = order_of({"tiny": self.total}, held, self.weights, self.past if self.remembers else None)
        order.run(self.waiting.values())
        for one in admitted:
            self._start(one)
        for found in preemptions(order, self.running.values(), self.now) if self.preempts else ():
            for victim in found.victims:
                del self.running[victim.uid]
                self.waiting[victim.uid] = victim
                self.past.refund(victim.tenant, sum(victim.need.values()) / self.total)
            self._start(found.preemptor, {victim.uid for victim in found.victims})
        self._run()

    def _start(self, job: JobDemand, victims: Collection[str] = ()) -> None:
        del self.waiting[job.uid]
        self.running[job.uid] = RunningJob(job, self.now)
        self.started_at.setdefault(job.document.job, self.now)
        self.changes.append((job.uid, set(victims)))
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

    def settle(self) -> None:
        """Go on until nothing changes for longer than no job may be preempted."""
        for _ in range(200):
            before = len(self.changes)
            self.run_until(self.now + MIN_RUN_S + TICK_S)
            if len(self.changes) == before:
                return
        raise AssertionError("the preemptions do not end")
