"""Fairness over random traces in which episodes open, wait for tools and end, and requests are passed: the bound of the module, and work conservation.

The room, the requests and the tools are simulated; time is a number of rounds.
"""

import itertools
import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from marlaas_worker.fair_queue import FairQueue

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
