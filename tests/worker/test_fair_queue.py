"""Fairness as the module states it: the bound over random traces, the lift, work conservation, and what gains nothing."""

import itertools
import math
import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tables import rows

from marlaas_worker.fair_queue import FairQueue


def served(queue, most=99, **room):
    return [ticket.item for _ in range(most) if (ticket := queue.pop(**room))]


@pytest.mark.parametrize(("requests", "order", "usage"), rows(__file__, "served"))
def test_the_smallest_usage_by_weight_is_served_first_of_tenants_jobs_and_agents(requests, order, usage):
    queue = FairQueue()
    for path, names, cost, weight in requests:
        for name in names.split():
            queue.push(tuple(path.split("/")), name, cost=cost, weight=weight)
    assert served(queue, len(order.split())) == order.split()
    assert {tenant: queue.usage(tenant) for tenant in usage} == usage


def test_the_real_cost_replaces_the_estimate_and_a_removed_request_costs_nothing():
    queue = FairQueue()
    queue.open(("a", "job"))
    first, second = (queue.push(("a", "job"), item, cost=10) for item in "xy")
    queue.remove(first)
    assert len(queue) == 1
    assert queue.pop() is second
    assert queue.usage("a") == 10
    queue.settle(second, 4)
    assert queue.usage("a") == 4


def test_an_idle_tenant_saves_up_no_credit_and_usage_elsewhere_or_beyond_others_counts():
    queue = FairQueue()
    queue.open(("a", "job"))
    queue.open(("b", "job"))
    queue.close(("b", "job"))
    queue.charge(("a", "job"), 100)
    queue.open(("b", "job"))
    assert queue.usage("b") == 100
    queue.close(("a", "job"))
    queue.close(("b", "job"))
    queue.open(("c", "job"))
    assert queue.usage("c") == 100, "as the last active one"
    queue = FairQueue()
    queue.open(("a", "job"))
    queue.charge(("a",), 30.0)
    queue.charge(("b",), 1000.0)
    assert (queue.usage("a"), queue.usage("a", "job")) == (30, 0)
    queue.open(("b", "job"))
    assert queue.usage("b") == 30
    queue.charge(("b", "job"), 50)
    queue.close(("b", "job"))
    queue.open(("b", "job"))
    assert queue.usage("b") == 80


@pytest.mark.parametrize(("max_credit", "usage"), [(math.inf, 0), (10.0, 40 / 3 - 10.0), (0.0, 40 / 3)])
def test_a_tool_call_does_not_erase_credit_up_to_the_most(max_credit, usage):
    """`a` waits for a tool, of weight 1, while 50 is served to `b`, of weight 3: the last request at a usage of 40 / 3."""
    queue = FairQueue(max_credit=max_credit)
    queue.open(("a", "job"))
    for number in range(5):
        queue.push(("b", "job"), f"b{number}", cost=10, weight=3.0)
    while (ticket := queue.pop()) is not None:
        queue.settle(ticket, 10)
    queue.push(("a", "job"), "after the tool call", cost=10)
    assert queue.usage("a") == pytest.approx(usage)  # `b` has no open episode


def test_the_credit_of_all_active_tenants_together_is_bounded():
    queue = FairQueue(max_credit=10.0)
    queue.open(("a", "job"))
    queue.open(("b", "job"), 3.0)
    queue.push(("b", "job"), "b", cost=300)
    queue.pop()
    queue.push(("b", "job"), "again", cost=10)
    queue.push(("a", "job"), "after the tool call", cost=10)
    assert (queue.usage("a"), queue.usage("b")) == (100 - 10.0 / 4, 100)


def test_memory_is_bounded_by_what_is_active():
    queue = FairQueue()
    queue.open(("stays", "job"))
    for number in range(1000):
        queue.push((f"tenant-{number}", f"job-{number}"), number, cost=1, weight=2.0)
        queue.settle(queue.pop(), 1)
        queue.charge(("stays", "job"), 2)
        assert len(queue._root.below) <= 2, "an account has the weight too"


def test_a_request_that_does_not_fit_is_passed_for_a_bounded_amount_by_all_together_then_waited_for():
    queue = FairQueue(max_passed=25)
    queue.push(("a", "job"), "giant", cost=1, size=100)
    for number in range(5):
        queue.push((f"t{number}", "job"), f"t{number}", cost=10, size=10)
    assert served(queue, room=50) == ["t0", "t1"], "30 would pass it"
    assert queue.pop(room=100).item == "giant"
    assert served(queue, room=50) == ["t2", "t3", "t4"]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_positive_number_is_refused(weight):
    with pytest.raises(ValueError, match="tenant a has weight"):
        FairQueue().push(("a", "job"), "x", cost=1, weight=weight)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32),
    weights=st.fixed_dictionaries({"f": st.floats(0.1, 10), "g": st.floats(0.1, 10), "other": st.just(1.0)}),
    most_in_flight=st.integers(0, 20),
)
def test_the_services_of_two_busy_tenants_differ_by_no_more_than_the_bound(seed, weights, most_in_flight):
    """f and g always have ten queued requests, with estimates that may be wrong by any factor up to 8; others come and go."""
    draw, queue, in_flight = random.Random(seed), FairQueue(), deque()
    num_queued, served, errors = Counter(), Counter(), Counter()
    largest_cost = largest_error = 0.0
    for number in range(300):
        for tenant in "fg":
            while num_queued[tenant] < 10:
                cost = float(draw.randint(1, 100))
                path = tenant, f"job-{draw.randint(0, 3)}"
                queue.push(path, cost, cost=cost * 2 ** draw.uniform(-3, 3), weight=weights[tenant])
                num_queued[tenant] += 1
        if draw.random() < 0.1:
            queue.push(("other", f"job-{number}"), 50.0, cost=50.0)
        ticket = queue.pop()
        tenant = ticket.path[0]
        num_queued[tenant] -= 1
        in_flight.append(ticket)
        served[tenant] += ticket.item
        errors[tenant] += abs(ticket.charged - ticket.item)
        largest_cost, largest_error = max(largest_cost, ticket.item), max(largest_error, *errors.values())
        while len(in_flight) > draw.randint(0, most_in_flight):
            ended = in_flight.popleft()
            errors[ended.path[0]] -= abs(ended.charged - ended.item)
            queue.settle(ended, ended.item)
        difference = abs(served["f"] / weights["f"] - served["g"] / weights["g"])
        # the estimate of the request that was just served is in flight too
        bound = (largest_cost + largest_error) * (1 / weights["f"] + 1 / weights["g"])
        assert difference <= bound * (1 + 1e-9)


ROOM = 400.0


@dataclass
class Tenant:
    """A tenant of the trace: how many episodes it plays at a time, the largest cost of its requests, and the longest tool."""

    weight: float
    num_episodes: int
    largest: int
    longest_tool: int


@dataclass
class Request:
    """A request in the trace. rounds: how long it runs. episode: number of its episode."""

    cost: float
    rounds: int
    episode: int


class Trace:
    """Tenants play episodes, one after another, in a limited room.

    served: cost by tenant of all requests that were served. credit: by tenant, the most that it could have when it last
    queued a request after having none. error: the largest sum of a tenant's errors of estimates in flight.
    """

    def __init__(self, seed, tenants, max_passed=ROOM):
        self.random = random.Random(seed)
        self.tenants = tenants
        self.queue = FairQueue(max_passed, max_credit=ROOM)
        self.room, self.now, self.cost, self.error = ROOM, 0, 0.0, 0.0
        self.in_flight, self.due, self.credit = [], defaultdict(list), {}
        self.served, self.queued, self.errors = Counter(), Counter(), Counter()
        for name, tenant in tenants.items():
            for episode in range(tenant.num_episodes):
                self.due[self.random.randint(0, tenant.longest_tool)].append((name, episode, 0))

    def round(self):
        """Let requests end, tools return and episodes begin; then fill the room."""
        for end, ticket in [one for one in self.in_flight if one[0] <= self.now]:
            self.in_flight.remove((end, ticket))
            self.end(ticket)
        for name, episode, turn in self.due.pop(self.now, ()):
            self.ask(name, episode, turn)
        while (ticket := self.queue.pop(self.room)) is not None:
            self.room -= ticket.size
            tenant = ticket.path[0]
            self.queued[tenant] -= 1
            self.served[tenant] += ticket.item.cost
            self.errors[tenant] += abs(ticket.charged - ticket.item.cost)
            self.error = max(self.error, self.errors[tenant])
            self.in_flight.append((self.now + ticket.item.rounds, ticket))
        assert self.in_flight or not len(self.queue), "the room is empty, and requests wait"
        self.now += 1

    def ask(self, name, episode, turn):
        """Begin a turn, or end the episode after the third one and begin another."""
        tenant, path = self.tenants[name], (name, f"job-{episode % 3}")
        if turn == 0:
            self.queue.open(path, tenant.weight)
        if turn == 3:
            self.queue.close(path)
            self.later(name, episode, 0)
            return
        cost = float(self.random.randint(1, tenant.largest))
        estimate = min(cost * 2 ** self.random.uniform(-1, 1), ROOM / 2)
        size = min(ROOM, float(math.ceil(estimate) + self.random.randint(0, tenant.largest)))
        request = Request(cost, self.random.randint(1, 8), (episode << 2) + turn)
        self.queue.push(path, request, cost=estimate, size=size, weight=tenant.weight)
        if not self.queued[name]:
            self.credit[name] = self.queue.max_credit / self.queue._root.active_weight
        self.queued[name] += 1
        self.cost = max(self.cost, cost)

    def end(self, ticket):
        self.room += ticket.size
        self.errors[ticket.path[0]] -= abs(ticket.charged - ticket.item.cost)
        self.queue.settle(ticket, ticket.item.cost)
        self.later(ticket.path[0], ticket.item.episode >> 2, (ticket.item.episode & 3) + 1)

    def later(self, name, episode, turn):
        self.due[self.now + 1 + self.random.randint(0, self.tenants[name].longest_tool)].append((name, episode, turn))


def check(trace, begins):
    """Assert the bound of the module for each pair of tenants; begins: the services of those that had queued requests throughout since."""
    for f, g in itertools.combinations(trace.tenants, 2):
        if not (trace.queued[f] and trace.queued[g]):
            begins.pop((f, g), None)
            continue
        weights = [trace.tenants[name].weight for name in (f, g)]
        now = [trace.served[name] / weight for name, weight in zip((f, g), weights, strict=True)]
        begin = begins.setdefault((f, g), now)
        largest = trace.cost + 2 * trace.error + trace.queue.max_passed
        bound = largest * sum(1 / weight for weight in weights) + max(trace.credit[f], trace.credit[g])
        assert abs((now[0] - begin[0]) - (now[1] - begin[1])) <= bound * (1 + 1e-9)


TENANTS = st.builds(
    Tenant,
    weight=st.floats(0.2, 5.0),
    num_episodes=st.integers(1, 30),
    largest=st.sampled_from([10, 60, 300]),
    longest_tool=st.sampled_from([0, 3, 40, 300]),
)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.lists(TENANTS, min_size=2, max_size=4), st.sampled_from([0.0, ROOM / 4, ROOM]))
def test_the_bound_holds_however_episodes_wait_and_requests_are_passed(seed, tenants, max_passed):
    trace, begins = Trace(seed, {f"tenant-{number}": one for number, one in enumerate(tenants)}, max_passed), {}
    for _ in range(600):
        trace.round()
        check(trace, begins)
