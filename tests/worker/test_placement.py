"""Properties of the placement, over random agents and workers."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from marlaas_worker.placement import EPSILON, AgentLoad, place

SEEDS = range(60)


def drawn(seed, *, with_parts):
    """Agents with costs that differ by up to a factor of ten, some with a holder, and workers.

    with_parts: also agents of up to as many parts as there are workers.
    """
    draw = random.Random(seed)
    workers = [f"trainer-{number}" for number in range(draw.randint(1, 6))]
    holders = [*workers, "dead", ""]
    agents = {
        f"team.job-{number}.policy": AgentLoad(draw.uniform(1.0, 10.0), draw.choice(holders))
        for number in range(draw.randint(0, 60))
    }
    for number in range(draw.randint(1, 8) if with_parts else 0):
        cost, num = draw.uniform(5.0, 40.0), draw.randint(1, len(workers))
        for part in range(num):
            whole, holder = f"large-{number}", draw.choice(holders)
            agents[f"team.{whole}.policy/{part}"] = AgentLoad(cost / num, holder, whole=whole)
    return agents, workers


def held(agents, placed):
    return {name: replace(agent, holder=placed[name]) for name, agent in agents.items()}


def equal(num):
    return {f"team.job-{number}.policy": AgentLoad() for number in range(num)}


@pytest.mark.parametrize("with_parts", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_placement_is_within_the_bound_keeps_parts_apart_stays_and_depends_on_no_order(seed, with_parts):
    agents, workers = drawn(seed, with_parts=with_parts)
    placed = place(agents, workers)
    assert placed.keys() == agents.keys()
    loads = Counter(dict.fromkeys(workers, 0.0))
    for name, worker in placed.items():
        loads[worker] += agents[name].cost
    mean, largest = sum(loads.values()) / len(workers), max((agent.cost for agent in agents.values()), default=0.0)
    assert max(loads.values()) <= (1 + EPSILON) * mean + largest + 1e-9
    pairs = [(agents[name].whole, worker) for name, worker in placed.items() if agents[name].whole]
    assert len(pairs) == len(set(pairs))
    assert place(held(agents, placed), workers) == placed
    assert place(dict(reversed(agents.items())), workers[::-1]) == placed
    draw, placed = random.Random(seed), place({name: replace(one, holder="") for name, one in agents.items()}, workers)
    nearly = {
        name: replace(one, cost=one.cost * draw.uniform(0.97, 1.03)) for name, one in held(agents, placed).items()
    }
    assert with_parts or place(nearly, workers) == placed, "small changes of cost move nothing"


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
def test_a_worker_that_joins_takes_over_its_share_and_only_agents_of_one_that_dies_move(num_workers):
    workers = [f"trainer-{number}" for number in range(num_workers)]
    agents = equal(32)
    before = place(agents, workers)
    after = place(held(agents, before), [*workers, "new"])
    moved = [name for name in agents if before[name] != after[name]]
    assert {after[name] for name in moved} == {"new"}
    assert 1 <= len(moved) <= math.ceil(32 / (num_workers + 1)) + 1
    without = place(held(agents, before), workers[1:] or ["other"])
    assert all(without[name] == worker for name, worker in before.items() if worker != workers[0])


def test_agents_that_a_worker_gave_up_or_refuses_do_not_come_back():
    """They have no holder until the other worker has bound them, one after the other."""
    workers, agents = ["old", "new"], held(equal(16), dict.fromkeys(equal(16), "old"))
    placed = place(agents, workers)
    released = {name: replace(agent, holder="") if placed[name] == "new" else agent for name, agent in agents.items()}
    for name in [name for name, worker in placed.items() if worker == "new"]:
        found = place(released, workers)
        assert all(found[other] == "new" for other, agent in released.items() if not agent.holder)
        released[name] = replace(released[name], holder="new")
    refused = AgentLoad(holder="a", refused=frozenset({"a"}))
    assert place({"agent": refused}, ["a", "b"]) == {"agent": "b"}
    assert place({"agent": replace(refused, refused=frozenset("ab"))}, ["a", "b"]) == {}
    assert place(equal(3), []) == {}
    parts = {f"a/{number}": AgentLoad(whole="a") for number in range(3)}
    assert place(parts, ["one", "two"]).keys() == {"a/0", "a/1"}, "parts beyond the number of workers are left out"


def test_one_agent_moves_if_that_lowers_the_largest_load_by_much():
    """With few agents, a load may be far above the mean and within the bound, which has room for the largest agent."""
    held_by = {"a": "one", "b": "one", "c": "two", "d": "two"}
    costs = {"a": 8.0, "b": 4.0, "c": 2.0, "d": 1.0}
    agents = {name: AgentLoad(costs[name], holder) for name, holder in held_by.items()}
    placed = place(agents, ["one", "two"])
    assert placed == held_by | {"b": "two"}, "12 and 3 become 8 and 7"
    assert place(held(agents, placed), ["one", "two"]) == placed
    nearly = {name: AgentLoad(costs[name], "one" if name in "ad" else "two") for name in costs}
    assert place(nearly, ["one", "two"])["d"] == "two", "9 and 6 become 8 and 7"
    assert place(nearly | {"d": AgentLoad(0.5, "one")}, ["one", "two"])["d"] == "one", "8.5 and 6 stay"
