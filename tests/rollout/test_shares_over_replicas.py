"""Two replicas whose queues charge what the other one reports: a tenant that both serve gets its share of both together."""

import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from marlaas_worker.fair_queue import FairQueue
from marlaas_worker.rollout.accounts import OtherReplicas

LARGEST = 100


@dataclass
class Replica:
    """A simulated replica. It serves one request after another; each of its tenants always has two more in the queue.

    rate: tokens a second. totals: what it reports, since its start.
    """

    rate: float
    weights: dict[str, float]
    queue: FairQueue[int] = field(default_factory=FairQueue)
    others: OtherReplicas = field(default_factory=OtherReplicas)
    totals: Counter[str] = field(default_factory=Counter)
    free_at: float = 0.0

    def start(self, draw: random.Random) -> None:
        """Begin with an empty queue and no totals, as a process does."""
        self.queue, self.others, self.totals = FairQueue(), OtherReplicas(), Counter()
        for tenant in self.weights:
            for _ in range(2):
                self.push(tenant, draw)

    def push(self, tenant: str, draw: random.Random) -> None:
        cost = draw.randint(1, LARGEST)
        self.queue.push((tenant, "job"), cost, cost=cost, weight=self.weights[tenant])

    def serve(self, draw: random.Random) -> tuple[str, int]:
        ticket = self.queue.pop()
        assert ticket is not None, "each tenant has requests, and the replica is idle"
        tenant, cost = ticket.path[0], ticket.item
        self.push(tenant, draw)
        self.queue.settle(ticket, cost)
        self.totals[tenant] += cost
        self.free_at += cost / self.rate
        return tenant, cost


@dataclass
class Pool:
    """Two replicas that report every `interval_s`. served: tokens by tenant of both."""

    replicas: tuple[Replica, Replica]
    interval_s: float
    seed: int
    served: Counter[str] = field(default_factory=Counter)
    report_at: float = 0.0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        for replica in self.replicas:
            replica.start(self.draw)

    def run(self, until: float) -> None:
        while (now := min(self.report_at, *(one.free_at for one in self.replicas))) < until:
            if now == self.report_at:
                self.report()
                continue
            replica = min(self.replicas, key=lambda one: one.free_at)
            tenant, cost = replica.serve(self.draw)
            self.served[tenant] += cost

    def report(self) -> None:
        first, second = self.replicas
        for one, other in ((first, second), (second, first)):
            for tenant, tokens in one.others.growth("other", other.totals).items():
                one.queue.charge((tenant,), tokens)
        self.report_at += self.interval_s

    @property
    def unreported(self) -> float:
        """The most that a replica serves between two reports."""
        return max(one.rate for one in self.replicas) * self.interval_s + LARGEST


def pool_of(seed: int, weights: dict[str, float], rates: tuple[float, float], interval_s: float) -> Pool:
    """Tenant `both` is served by both replicas, `one` by the first only."""
    return Pool((Replica(rates[0], weights), Replica(rates[1], {"both": weights["both"]})), interval_s, seed)


RATES = st.floats(200.0, 5000.0)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.floats(0.2, 5.0), st.floats(0.2, 5.0), st.tuples(RATES, RATES), st.floats(0.1, 3.0))
def test_the_service_of_both_replicas_together_approaches_the_weights_within_the_bound(
    seed: int, both: float, one: float, rates: tuple[float, float], interval_s: float
) -> None:
    pool = pool_of(seed, {"both": both, "one": one}, rates, interval_s)
    entitled = min(one / (one + both) * sum(rates), rates[0])  # `one` cannot have more than all of its replica
    bound = (LARGEST + 2 * pool.unreported) * (1 / both + 1 / one)
    for until in range(5, 60, 5):
        pool.run(float(until))
        if entitled < rates[0]:
            assert abs(pool.served["both"] / both - pool.served["one"] / one) <= bound
        else:
            assert pool.served["one"] >= entitled * until - bound * one


def test_without_reports_a_tenant_of_two_replicas_would_have_more() -> None:
    alone = pool_of(0, {"both": 1.0, "one": 1.0}, (1000.0, 1000.0), 1e9)
    alone.run(60.0)
    assert alone.served["both"] > 2.5 * alone.served["one"]
