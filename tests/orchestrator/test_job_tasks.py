"""Which task comes next: orders that are seeded and whole, and rest for tasks that teach nothing, within a bound."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tables import rows

from marlaas_api.messages import Difficulty, TaskOutcome
from marlaas_api.messages.training_settings import DataSettings
from marlaas_worker.orchestrator.job_tasks import DataOrder, Walk, permuted

SOLVED, HOPELESS, VARIED = Difficulty.SOLVED, Difficulty.HOPELESS, Difficulty.VARIED


def order(tasks: int | None = 4, kind: str = "sequential", seed: int = 7, first: int = 0, **skip: object) -> DataOrder:
    spec = {"order": kind} | ({"tasks": tasks} if tasks else {}) | ({"skip": skip} if skip else {})
    return DataOrder(DataSettings.model_validate(spec), seed, first)


def told(one: DataOrder, *results: tuple[int, Difficulty]) -> DataOrder:
    """Results by visit."""
    for visit, difficulty in results:
        one.add(TaskOutcome(index=one.task(visit), visit=visit, difficulty=difficulty))
    return one


@given(size=st.integers(1, 200), seed=st.integers(0, 2**63 - 1))
def test_a_shuffled_pass_has_every_task_once(size, seed):
    assert sorted(permuted(offset, size, seed) for offset in range(size)) == list(range(size))


def test_shuffling_favours_no_place():
    """Over 3000 seeds task 0 of 5 lands on each place 600 times; five standard deviations are 110."""
    places = [permuted(0, 5, seed) for seed in range(3000)]
    assert all(abs(places.count(place) - 600) < 110 for place in range(5))


@pytest.mark.parametrize(("after", "results", "rests"), rows(__file__, "rests"))
def test_a_task_rests_once_its_last_groups_agreed_without_variance(after, results, rests):
    assert told(order(4, after=after, passes=2), *results).skip_reason(8) == rests


@pytest.mark.parametrize("first", [0, 3])
def test_what_rests_is_left_out_and_counted_by_why_after_the_first_visits_of_another_data_set(first):
    results = enumerate((VARIED, SOLVED, HOPELESS, VARIED), first)
    one = told(order(4, first=first, passes=1, maxShare=0.9), *results)
    visits, walk = one.take(Walk(4 + first), 2)
    assert ([one.task(visit) for visit in range(first)], visits) == ([*range(first)], [4 + first, 7 + first])
    assert walk == Walk(next_visit=8 + first, in_pass=2, solved=1, hopeless=1)


@given(
    share=st.floats(0.01, 0.99),
    size=st.integers(1, 20),
    flat=st.lists(st.sampled_from(list(Difficulty)), min_size=20, max_size=20),
    rounds=st.lists(st.integers(1, 5), max_size=12),
)
def test_nobody_starves_and_the_walk_is_the_same_in_one_go_or_in_pieces(share, size, flat, rounds):
    one = told(order(size, "shuffled", passes=3, maxShare=share), *((v, flat[v]) for v in range(size)))
    begin = Walk(size)
    whole, end = one.take(begin, sum(rounds))
    pieces, walk = [], begin
    for number in rounds:
        visits, walk = one.take(walk, number)
        pieces += visits
    assert (pieces, walk) == (whole, end)
    for number in range(1, end.next_visit // size):
        given_out = [visit for visit in whole if visit // size == number]
        assert len(given_out) >= (1 - share) * size - 1e-9, f"pass {number}"


def share_with_signal(solved: float, hopeless: float, **skip: object) -> float:
    """Of the groups of 8 played in 12 passes' worth of a set of 200; tasks that are neither succeed half the time."""
    chance, one, walk = random.Random(1), order(200, "shuffled", 3, **skip), Walk()
    rates = [1.0] * int(200 * solved) + [0.0] * int(200 * hopeless)
    rates += [0.5] * (200 - len(rates))
    varied = 0
    for _ in range(300):
        visits, walk = one.take(walk, 8)
        for visit in visits:
            right = sum(chance.random() < rates[one.task(visit)] for _ in range(8))
            difficulty = {0: HOPELESS, 8: SOLVED}.get(right, VARIED)
            varied += difficulty is VARIED
            told(one, (visit, difficulty))
    return varied / 2400


@pytest.mark.parametrize(("solved", "hopeless", "shares"), rows(__file__, "shares_with_signal"))
def test_rest_turns_sampling_towards_what_teaches(solved, hopeless, shares):
    """The table in docs/how-to/data-order.md."""
    settings = ({}, {"after": 1}, {"passes": 8, "maxShare": 0.9})
    measured = [share_with_signal(solved, hopeless, **skip) for skip in settings]
    assert measured == pytest.approx(shares, abs=0.006)
