"""Which of an agent's replicas generates a group's turns: by load, the same for all members, and rarely another than before."""

from collections import Counter

import pytest

from marlaas_worker.rollout.homes import EVEN, MIN_EXCESS, Homes

KEY = "team-a.sums.policy"


def homes_of(**loads: int) -> Homes:
    return Homes({KEY: tuple(loads)}, tuple(loads), loads)


def shares(homes: Homes, num: int = 1024) -> dict[str, float]:
    """The parts of new groups."""
    found = Counter(homes.owner(KEY, f"uid-t{number}") for number in range(num))
    return {name: found[name] / num for name in homes.of(KEY)}


@pytest.mark.parametrize("first", [0, 5, 1000])
@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_groups_of_a_step_are_divided_evenly_while_the_loads_are_equal(num: int, first: int) -> None:
    placed = homes_of(**{f"r{number}": 7 for number in range(num)})
    found = Counter(placed.owner(KEY, f"uid-t{number}") for number in range(first, first + 4 * num))
    assert max(found.values()) - min(found[name] for name in placed.of(KEY)) <= 2


@pytest.mark.parametrize(
    ("loads", "parts"), [((8, 8), (1, 1)), ((0, 8), (4, 1)), ((40, 16), (1, 4)), ((8, 8, 24), (4, 4, 1))]
)
def test_new_groups_are_divided_by_the_inverse_square_of_the_loads(
    loads: tuple[int, ...], parts: tuple[int, ...]
) -> None:
    """Of the loads plus eight: (16, 16); (8, 16); (48, 24); (16, 16, 32)."""
    assert EVEN == 8
    found = shares(homes_of(**{f"r{number}": load for number, load in enumerate(loads)}))
    assert list(found.values()) == pytest.approx([part / sum(parts) for part in parts], abs=0.01)


@pytest.mark.parametrize(
    ("loads", "is_overloaded"),
    [((8, 0), False), ((9, 0), True), ((24, 12), False), ((25, 12), True), ((9, 2), False), ((30, 30), False)],
)
def test_a_replica_is_overloaded_with_twice_the_load_of_another_and_eight_requests_more(loads, is_overloaded) -> None:
    assert MIN_EXCESS == 8
    placed = homes_of(a=loads[0], b=loads[1])
    stay = [placed.owner(KEY, f"uid-t{number}", last="a") == "a" for number in range(256)]
    assert all(stay) is not is_overloaded


def test_the_part_of_an_overloaded_replicas_groups_moves_that_exceeds_the_mean_and_no_other_one() -> None:
    """30 and 10: a third of the 30 is above the mean of 20."""
    placed, groups = homes_of(a=30, b=10), [f"uid-t{number}" for number in range(2000)]
    moved = {group for group in groups if placed.owner(KEY, group, last="a") == "b"}
    assert len(moved) / len(groups) == pytest.approx(1 / 3, abs=0.03)
    assert all(placed.owner(KEY, group, last="b") == "b" for group in groups)
    assert {group for group in groups if homes_of(a=60, b=20).owner(KEY, group, last="a") == "b"} == moved


def test_a_group_leaves_a_replica_that_its_agent_has_left_and_names_of_others_mean_nothing() -> None:
    placed = homes_of(a=0, b=0)
    for last in ("gone", "", "c", "\0"):
        assert placed.owner(KEY, "uid-t0", last) == placed.owner(KEY, "uid-t0")
