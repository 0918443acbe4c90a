"""Properties of the placement, over random agents and workers."""

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from marlaas_worker.placement import EPSILON, AgentLoad, place

SEEDS = range(60)


def drawn(seed: int) -> tuple[dict[str, AgentLoad], list[str]]:
    """Agents with costs that differ by up to a factor of ten, some with a holder, and workers."""
    draw = random.Random(seed)
    workers = [f"trainer-{number}" for number in range(draw.randint(1, 6))]
    holders = [*workers, "dead", ""]
    agents = {
        f"team.job-{number}.policy": AgentLoad(draw.uniform(1.0, 10.0), draw.choice(holders))
        for number in range(draw.randint(0, 60))
    }
    return agents, workers


def held(agents: Mapping[str, AgentLoad], placed: Mapping[str, str]) -> dict[str, AgentLoad]:
    """The agents when every worker has taken what it was given."""
    return {name: replace(agent, holder=placed[name]) for name, agent in agents.items()}


def loads(agents: Mapping[str, AgentLoad], placed: Mapping[str, str], workers: Collection[str]) -> Counter[str]:
    found = Counter(dict.fromkeys(workers, 0.0))
    for name, worker in placed.items():
        found[worker] += agents[name].cost
    return found


def equal(num: int) -> dict[str, AgentLoad]:
    return {f"team.job-{number}.policy": AgentLoad() for number in range(num)}


@pytest.mark.parametrize("seed", SEEDS)
def test_every_agent_is_placed_and_no_load_exceeds_the_bound(seed: int) -> None:
    agents, workers = drawn(seed)
    placed = place(agents, workers)
    assert placed.keys() == agents.keys()
    assert set(placed.values()) <= set(workers)
    if agents:
        found = loads(agents, placed, workers)
        mean, largest = sum(found.values()) / len(workers), max(agent.cost for agent in agents.values())
        assert max(found.values()) <= (1 + EPSILON) * mean + largest + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_a_placement_that_is_carried_out_stays_and_depends_on_no_order(seed: int) -> None:
    agents, workers = drawn(seed)
    placed = place(agents, workers)
    assert place(held(agents, placed), workers) == placed
    assert place(dict(reversed(agents.items())), workers[::-1]) == placed


@pytest.mark.parametrize("seed", SEEDS)
def test_small_changes_of_cost_move_nothing(seed: int) -> None:
    agents, workers = drawn(seed)
    first = place({name: replace(agent, holder="") for name, agent in agents.items()}, workers)
    draw = random.Random(seed)
    changed = {
        name: replace(agent, cost=agent.cost * draw.uniform(0.97, 1.03)) for name, agent in held(agents, first).items()
    }
    assert place(changed, workers) == first


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
def test_a_worker_that_joins_takes_over_its_share_and_no_agent_moves_between_the_others(num_workers: int) -> None:
    workers = [f"trainer-{number}" for number in range(num_workers)]
    agents = equal(32)
    before = place(agents, workers)
    after = place(held(agents, before), [*workers, "new"])
    moved = [name for name in agents if before[name] != after[name]]
    assert {after[name] for name in moved} == {"new"}
    assert 1 <= len(moved) <= math.ceil(32 / (num_workers + 1)) + 1


@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_only_agents_of_a_worker_that_dies_move(num_workers: int) -> None:
    workers = [f"trainer-{number}" for number in range(num_workers)]
    agents = equal(32)
    before = place(agents, workers)
    after = place(held(agents, before), workers[1:])
    assert all(after[name] == worker for name, worker in before.items() if worker != workers[0])


def test_agents_that_a_worker_gave_up_for_another_do_not_come_back() -> None:
    """They have no holder until the other worker has bound them, one after the other."""
    workers, agents = ["old", "new"], held(equal(16), dict.fromkeys(equal(16), "old"))
    placed = place(agents, workers)
    released = {name: replace(agent, holder="") if placed[name] == "new" else agent for name, agent in agents.items()}
    for name in [name for name, worker in placed.items() if worker == "new"]:
        found = place(released, workers)
        assert all(found[other] == "new" for other, agent in released.items() if not agent.holder)
        released[name] = replace(released[name], holder="new")


def test_an_agent_goes_to_no_worker_that_refuses_it() -> None:
    refused = AgentLoad(holder="a", refused=frozenset({"a"}))
    assert place({"agent": refused}, ["a", "b"]) == {"agent": "b"}
    assert place({"agent": replace(refused, refused=frozenset("ab"))}, ["a", "b"]) == {}


def test_without_workers_nothing_is_placed() -> None:
    assert place(equal(3), []) == {}
    assert place({}, ["a"]) == {}


def test_one_agent_moves_if_that_lowers_the_largest_load_by_much():
    """With few agents, a load may be far above the mean and within the bound, which has room for the largest agent."""
    held_by = {"a": "one", "b": "one", "c": "two", "d": "two"}
    costs = {"a": 8.0, "b": 4.0, "c": 2.0, "d": 1.0}
    agents = {name: AgentLoad(costs[name], holder) for name, holder in held_by.items()}
    placed = place(agents, ["one", "two"])
    assert placed == held_by | {"b": "two"}, "12 and 3 become 8 and 7"
    assert place(held(agents, placed), ["one", "two"]) == placed
    after = {name: AgentLoad(costs[name], "one" if name in "ad" else "two") for name in costs}
    assert place(after, ["one", "two"])["d"] == "two", "9 and 6 become 8 and 7"
    nearly = after | {"d": AgentLoad(0.5, "one")}
    assert place(nearly, ["one", "two"])["d"] == "one", "8.5 and 6 stay"


def with_parts(seed: int) -> tuple[dict[str, AgentLoad], list[str]]:
    """As `drawn`, and agents of up to as many parts as there are workers."""
    agents, workers = drawn(seed)
    draw = random.Random(seed)
    for number in range(draw.randint(1, 8)):
        cost, num = draw.uniform(5.0, 40.0), draw.randint(1, len(workers))
        for part in range(num):
            holder = draw.choice([*workers, "dead", ""])
            agents[f"team.large-{number}.policy/{part}"] = AgentLoad(cost / num, holder, whole=f"large-{number}")
    return agents, workers


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_an_agent_are_on_different_workers_and_their_loads_count(seed: int) -> None:
    agents, workers = with_parts(seed)
    placed = place(agents, workers)
    assert placed.keys() == agents.keys()
    pairs = [(agents[name].whole, worker) for name, worker in placed.items() if agents[name].whole]
    assert len(pairs) == len(set(pairs))
    found = loads(agents, placed, workers)
    mean, largest = sum(found.values()) / len(workers), max(agent.cost for agent in agents.values())
    assert max(found.values()) <= (1 + EPSILON) * mean + largest + 1e-9
    assert place(held(agents, placed), workers) == placed
    assert place(dict(reversed(agents.items())), workers[::-1]) == placed


def test_rounding_errors_of_costs_do_not_decide_which_agent_moves() -> None:
    """Of two agents on one worker, either may move to a second one: the largest load is the same after it."""
    draw = random.Random(0)
    for _ in range(1000):
        costs = {name: AgentLoad(draw.uniform(0.5, 1.5), "one") for name in ("a", "b")}
        assert place(costs, ["one", "two"]) == {"a": "two", "b": "one"}


def test_parts_beyond_the_number_of_workers_are_left_out() -> None:
    parts = {f"a/{number}": AgentLoad(whole="a") for number in range(3)}
    assert place(parts, ["one", "two"]).keys() == {"a/0", "a/1"}
