"""Every dataset of reasoning-gym, and the levels of its curricula."""

import itertools
import re

import pytest
from tests.environment.playing import play, said
from tests.tables import rows

from marlaas.environment import Agents, Split, Task
from marlaas.envs.puzzles import LevelSchedule, Puzzles, checked_levels, dataset_names
from marlaas.envs.scripted import ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas_api.errors import InvalidInput

ODD_ANSWERS = ("", "?", "1", "-1e999", "{", "[[1", "9" * 5000, "((", "x=1/0", "\0", "a\nb", "None")
NEEDS_A_CONFIG = {"composite": {"datasets": [{"name": "chain_sum"}, {"name": "leg_counting", "weight": 2}]}}
HAVE_NO_ANSWER_OF_THEIR_OWN = ("boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour")
CURRICULUM = {"dataset": "chain_sum", "curriculum": {"num_terms": [0, 4], "num_digits": 1}, "curriculum_tasks": 10}


def agent():
    return Agents(EpisodeState(["policy"], ScriptedReplies([])))["policy"]


def outcomes(name, split):
    """What is wrong with a dataset: a task's own answer earns 1, odd ones earn 0 to 1 and break nothing."""
    puzzle = Puzzles(name, NEEDS_A_CONFIG.get(name, {}), {}, 0).draw(Task(split, 0, 7))
    scores = [puzzle.score(agent(), answer) for answer in ODD_ANSWERS]
    own = 1.0 if name in HAVE_NO_ANSWER_OF_THEIR_OWN else puzzle.score(agent(), puzzle.entry["answer"])
    return [] if own == 1.0 and all(0 <= score <= 1 for score in scores) else [(name, split, own, scores)]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the package's
def test_every_dataset_can_be_played():
    assert len(dataset_names()) == 106
    names = zip(dataset_names(), itertools.cycle(Split), strict=False)
    assert [found for name, split in names for found in outcomes(name, split)] == []


def drawn(split, index, args=CURRICULUM):
    return said(play("reasoning-gym", args, lambda _: "0", Task(split, index, 7))[1].asked[0].request)


def num_terms(question):
    return len(re.findall(r"\d+", question))


def test_a_curriculum_makes_later_tasks_harder_and_the_held_out_ones_hardest_whatever_was_played_before():
    assert [num_terms(drawn(Split.TRAIN, index)) for index in (0, 1)] == [2, 2]
    assert max(num_terms(drawn(Split.TRAIN, index)) for index in range(10, 20)) > 4
    assert max(num_terms(drawn(Split.EVAL, index)) for index in range(10)) > 4
    assert max(len(number) for number in re.findall(r"\d+", drawn(Split.TRAIN, 0))) <= 2
    later = drawn(Split.TRAIN, 8)
    assert [drawn(Split.TRAIN, index) for index in (8, 0, 8)] == [later, drawn(Split.TRAIN, 0), later]


def test_levels_rise_in_equal_stretches_and_stay_and_all_of_them_are_known():
    levels = LevelSchedule({"terms": (1, 3), "digits": (2, 2)}, num_tasks=6)
    assert [levels.at(Split.TRAIN, index)["terms"] for index in range(9)] == [1, 1, 2, 2, 3, 3, 3, 3, 3]
    assert {levels.at(Split.TRAIN, index)["digits"] for index in range(9)} == {2}
    assert {levels.at(Split.EVAL, index)["terms"] for index in range(9)} == {3}, "held-out tasks have the last level"
    known = [(0, 0), (0, 1), (1, 1), (1, 2)]
    assert LevelSchedule({"a": (0, 1), "b": (0, 2)}, 6).all() == [{"a": a, "b": b} for a, b in known]
    assert LevelSchedule({"a": (2, 2)}, 0).all() == [{"a": 2}]


@pytest.mark.parametrize(("given", "num_tasks", "words"), rows(__file__, "levels"))
def test_levels_that_are_none(given, num_tasks, words):
    with pytest.raises(InvalidInput, match=words):
        checked_levels("the thing", given, num_tasks, {"terms": 4, "digits": 3})
