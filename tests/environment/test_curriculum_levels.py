"""Which level a task has: pure arithmetic."""

import pytest

from marlaas.envs.puzzles import LevelSchedule, checked_levels
from marlaas_api.errors import InvalidInput
from marlaas_api.names import Split

NUM_LEVELS = {"terms": 4, "digits": 3}


def test_levels_rise_in_equal_stretches_and_stay() -> None:
    levels = LevelSchedule({"terms": (1, 3), "digits": (2, 2)}, num_tasks=6)
    assert [levels.at(Split.TRAIN, index)["terms"] for index in range(9)] == [1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert {levels.at(Split.TRAIN, index)["digits"] for index in range(9)} == {2}


def test_what_is_held_out_has_the_last_level() -> None:
    levels = LevelSchedule({"terms": (0, 3)}, num_tasks=100)
    assert {levels.at(Split.EVAL, index)["terms"] for index in range(100)} == {3}


def test_all_that_training_goes_through_is_known() -> None:
    assert LevelSchedule({"a": (0, 1), "b": (0, 2)}, 6).all() == [
        {"a": 0, "b": 0},
        {"a": 0, "b": 1},
        {"a": 1, "b": 1},
        {"a": 1, "b": 2},
    ]
    assert LevelSchedule({"a": (2, 2)}, 0).all() == [{"a": 2}]


@pytest.mark.parametrize(
    ("given", "num_tasks", "words"),
    [
        ({"term": 1}, 0, "did you mean 'terms'.*it has terms, digits"),
        ({"terms": 4}, 0, "a level from 0 to 3"),
        ({"terms": -1}, 0, "a level from 0 to 3"),
        ({"terms": [2, 1]}, 9, "or \\[first, last\\]"),
        ({"terms": [0, 1, 2]}, 9, "or \\[first, last\\]"),
        ({"terms": "1"}, 9, "a level from 0 to 3"),
        ({"terms": True}, 9, "a level from 0 to 3"),
        ({"digits": [0, 1]}, 0, "'digits' rises; set curriculum_tasks"),
        ({"digits": 1}, -1, "curriculum_tasks is -1"),
    ],
)
def test_levels_that_are_none(given: dict[str, object], num_tasks: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        checked_levels("the thing", given, num_tasks, NUM_LEVELS)
