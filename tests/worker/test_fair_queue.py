"""Fairness as the module states it: the bound over random traces, the lift, work conservation, and what gains nothing."""

import math
import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlaas_worker.fair_queue import FairQueue


def served(queue, most=99, **room):
    """Pop up to so many requests; return what they are."""
    return [ticket.item for _ in range(most) if (ticket := queue.pop(**room))]


def test_the_smallest_usage_divided_by_weight_is_served_first():
    queue = FairQueue()
    for number in range(3):
        queue.push(("a", "job"), f"a{number}", cost=4)
        queue.push(("b", "job"), f"b{number}", cost=4, weight=2.0)
    # usage a, b: 0 0 | 4 0 | 4 2 | 4 4 | 8 4 | 8 6
    assert served(queue) == ["a0", "b0", "b1", "a1", "b2", "a2"]
    assert (queue.usage("a"), queue.usage("b")) == (12, 6)


def test_jobs_of_a_tenant_and_agents_of_a_job_share_its_service():
    queue = FairQueue()
    for number in range(4):
        queue.push(("a", "long"), f"long{number}", cost=3)
        queue.push(("a", "short"), f"short{number}", cost=1)
    assert served(queue, 6) == ["long0", "short0", "short1", "short2", "long1", "short3"]
    queue = FairQueue()
    for number in range(20):
        queue.push(("a", "team", "floods"), f"flood{number}", cost=1)
    queue.push(("a", "team", "calm"), "calm", cost=1)
    queue.push(("a", "single"), "single", cost=1)
    assert served(queue, 4) == ["flood0", "single", "calm", "flood1"]


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


def test_an_idle_tenant_saves_up_no_credit():
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


def test_use_elsewhere_counts_for_active_tenants_only_and_usage_beyond_the_others_is_not_forgiven_by_leaving():
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
