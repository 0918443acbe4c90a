"""Two replicas whose queues charge what the other one reports: a tenant that both serve gets its share of both together."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from marlaas_worker.fair_queue import FairQueue
from marlaas_worker.rollout.reception import OtherReplicas

LARGEST = 100
RATES = st.floats(200.0, 5000.0)


class Replica:
    """It serves one request after another, at a rate in tokens a second; each of its tenants always has two more in the queue."""

    def __init__(self, rate: float, weights: dict[str, float], draw: random.Random) -> None:
        self.rate, self.weights, self.draw, self.free_at = rate, weights, draw, 0.0
        self.queue, self.others, self.totals = FairQueue[int](), OtherReplicas(), Counter[str]()
        for tenant in (*weights, *weights):
            self.push(tenant)

    def push(self, tenant: str) -> None:
        cost = self.draw.randint(1, LARGEST)
        self.queue.push((tenant, "job"), cost, cost=cost, weight=self.weights[tenant])

    def serve(self) -> None:
        ticket = self.queue.pop()
        self.push(ticket.path[0])
        self.queue.settle(ticket, ticket.item)
        self.totals[ticket.path[0]] += ticket.item
        self.free_at += ticket.item / self.rate


def served(weights: dict[str, float], rates: tuple[float, float], interval_s: float, seed: int):
    """After every 5 of 60 seconds, the tokens of each tenant; `both` is served by both replicas, `one` by the first only."""
    draw = random.Random(seed)
    first, second = Replica(rates[0], weights, draw), Replica(rates[1], {"both": weights["both"]}, draw)
    report_at = 0.0
    for until in range(5, 65, 5):
        while (now := min(report_at, first.free_at, second.free_at)) < until:
            if now < report_at:
                min(first, second, key=lambda replica: replica.free_at).serve()
                continue
            report_at += interval_s
            for replica, other in ((first, second), (second, first)):
                for tenant, tokens in replica.others.growth("other", other.totals).items():
                    replica.queue.charge((tenant,), tokens)
        yield until, first.totals + second.totals


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.floats(0.2, 5.0), st.floats(0.2, 5.0), st.tuples(RATES, RATES), st.floats(0.1, 3.0))
def test_the_service_of_both_replicas_approaches_the_weights_within_the_bound(seed, both, one, rates, interval_s):
    entitled = min(one / (one + both) * sum(rates), rates[0])  # `one` cannot have more than all of its replica
    unreported = max(rates) * interval_s + LARGEST
    bound = (LARGEST + 2 * unreported) * (1 / both + 1 / one)
    for until, tokens in served({"both": both, "one": one}, rates, interval_s, seed):
        if entitled < rates[0]:
            assert abs(tokens["both"] / both - tokens["one"] / one) <= bound
        else:
            assert tokens["one"] >= entitled * until - bound * one


def test_without_reports_a_tenant_of_two_replicas_would_have_more():
    *_, (_, tokens) = served({"both": 1.0, "one": 1.0}, (1000.0, 1000.0), 1e9, 0)
    assert tokens["both"] > 2.5 * tokens["one"]
