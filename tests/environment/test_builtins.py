"""The builtin environments, every dataset of reasoning-gym, and the levels of its curricula."""

import itertools
import re
from typing import Any

import pytest
from tests.environment.playing import first_task, play, said
from tests.tables import rows

from marlaas.environment import Agents, Split, Task
from marlaas.envs.loading import resolve
from marlaas.envs.puzzles import LevelSchedule, Puzzles, checked_levels, dataset_names
from marlaas.envs.scripted import ScriptedReplies
from marlaas.episode_state import EpisodeState
from marlaas.models.curriculum import tool_reply
from marlaas_api.errors import InvalidInput


def reversed_word(request):
    return said(request).removeprefix("reverse: ")[::-1]


def with_the_tool(request):
    return f"calc: {said(request).removesuffix('=?')}" if said(request).endswith("=?") else said(request)


def prompts(name, args, split, num, seed=7):
    return [said(play(name, args, lambda _: "", Task(split, index, seed))[1].asked[0].request) for index in range(num)]


def test_reverse_wants_the_word_reversed():
    outcome, channel = play("reverse", {}, reversed_word)
    assert re.fullmatch(r"reverse: [a-z]{3,5}", said(channel.asked[0].request))
    assert (outcome.rewards, outcome.metrics) == ({"policy": 1.0}, {"exact": 1.0})
    assert play("reverse", {}, lambda request: reversed_word(request) + "x")[0].rewards == {"policy": 0.0}


def test_calculator_pays_for_a_right_result_that_came_from_the_tool_however_often_it_is_called():
    def stumbling(request):
        if said(request) == "error":
            return f"calc: {first.removesuffix('=?')}"
        return "calc: 1//2" if said(request).endswith("=?") else f"it is {said(request)}."

    outcome, channel = play("calculator", {"tool_latency_s": 0.1}, with_the_tool)
    assert (outcome.rewards, outcome.metrics) == ({"policy": 1.0}, {"tool_calls": 1.0, "tool_used": 1.0})
    assert outcome.tool_s >= 0.1
    assert [asked.request.append[-1].role for asked in channel.asked] == ["user", "tool"]  # type: ignore[union-attr]
    first = prompts("calculator", {}, Split.EVAL, 1)[0]
    outcome, _ = play("calculator", {}, stumbling, first_task(Split.EVAL))
    assert (outcome.rewards, outcome.metrics["tool_calls"]) == ({"policy": 1.0}, 2.0)
    for unpaid in (
        lambda request: tool_reply(said(request).removesuffix("=?")),
        lambda request: with_the_tool(request) if said(request).endswith("=?") else "123456",
    ):
        assert play("calculator", {}, unpaid)[0].rewards == {"policy": 0.0}, "a right guess, a wrong result"


SUMS = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


@pytest.mark.parametrize(
    ("name", "args"), [("reverse", {}), ("calculator", {"max_operand": 9, "operators": "-"}), ("reasoning-gym", SUMS)]
)
def test_tasks_are_reproducible_varied_and_never_in_both_splits(name, args):
    trained, held_out = prompts(name, args, Split.TRAIN, 40), prompts(name, args, Split.EVAL, 40)
    assert trained == prompts(name, args, Split.TRAIN, 40)
    assert len(set(trained)) > 10
    assert name != "calculator" or all(re.fullmatch(r"[1-9]-[1-9]=\?", prompt) for prompt in trained)
    assert not set(trained) & set(held_out)
    assert not set(prompts(name, args, Split.TRAIN, 40, seed=8)) & set(held_out)


def right_sum(request):
    expression = re.search(r"\d+ [-+] \d+", said(request))
    return tool_reply(expression[0])


def test_reasoning_gym_scores_the_answer_and_can_pay_for_form():
    assert play("reasoning-gym", SUMS, right_sum)[0].rewards == {"policy": 1.0}
    wordy, _ = play("reasoning-gym", SUMS, lambda r: f"Let me see: 1 and 2 is not it, so {right_sum(r)}.")
    assert (wordy.rewards, wordy.metrics) == ({"policy": 1.0}, {"correct": 1.0, "formed": 0.0})
    assert play("reasoning-gym", SUMS, lambda r: f"{right_sum(r)}8")[0].rewards["policy"] < 1.0
    assert play("reasoning-gym", SUMS, lambda _: "no idea")[0].rewards == {"policy": 0.0}
    args = {**SUMS, "shaping": {"exact": 0.25, "format": 0.125}}
    rewards = [
        play("reasoning-gym", args, answer)[0].rewards["policy"]
        for answer in (right_sum, lambda r: f"It is {right_sum(r)}.", lambda _: "-99", lambda _: "It is -99.")
    ]
    assert rewards == [1.0, 0.625, 0.125, 0.0]


@pytest.mark.parametrize(("name", "args", "words"), rows(__file__, "arguments"))
def test_arguments_that_a_builtin_cannot_take(name, args, words):
    with pytest.raises(InvalidInput, match=words):
        resolve(name, args).create()


def guess(answer, index=0, split=Split.TRAIN, **args: Any):
    return play("guess-number", args, lambda request: answer(said(request)), Task(split, index, 7))[0]


class Halving:
    def __init__(self, low, high, num_wasted=0):
        self.low, self.high, self.num_wasted = low, high, num_wasted
        self.guess = 0

    def __call__(self, heard):
        if heard == "Higher." and self.guess >= self.low:
            self.low = self.guess + 1
        if heard == "Lower." and self.guess <= self.high:
            self.high = self.guess - 1
        if self.num_wasted:
            self.num_wasted -= 1
            return "well"
        self.guess = (self.low + self.high) // 2
        return f"My guess is {self.guess}."


def secret(index, split):
    halving = Halving(1, 100)
    guess(halving, index, split)
    return halving.guess


def test_halving_earns_all_less_for_more_guesses_and_numbers_are_trained_on_or_held_out():
    outcomes = [guess(Halving(1, 100), index) for index in range(40)]
    assert {outcome.rewards["policy"] for outcome in outcomes} == {1.0}
    assert max(outcome.metrics["guesses"] for outcome in outcomes) <= 7
    base = int(guess(Halving(1, 100)).metrics["guesses"])
    rewards = {n: guess(Halving(1, 100, n)).rewards["policy"] for n in (7 - base, 8 - base, 14 - base, 15 - base)}
    assert rewards == {7 - base: 1.0, 8 - base: pytest.approx(1 - 0.5 / 7), 14 - base: 0.5, 15 - base: 0.0}
    trained = {secret(index, Split.TRAIN) for index in range(60)}
    held_out = {secret(index, Split.EVAL) for index in range(60)}
    assert len(trained) > 20
    assert len(held_out) > 5
    assert not trained & held_out


def test_a_width_gives_each_task_a_range_of_its_own_in_which_its_number_is():
    def halve(text):
        nonlocal halving
        if found := re.findall(r"\d+", text):
            ranges.append((int(found[0]), int(found[1])))
            halving = Halving(*ranges[-1])
        return halving(text)

    ranges: list[tuple[int, int]] = []
    halving = Halving(0, 0)
    outcomes = [guess(halve, index, high=40, width=20) for index in range(40)]
    assert {outcome.rewards["policy"] for outcome in outcomes} == {1.0}
    assert max(outcome.metrics["guesses"] for outcome in outcomes) == 5
    assert {high - low for low, high in ranges} == {19}
    assert {min(ranges), max(ranges)} <= {(low, low + 19) for low in range(1, 22)}
    assert len(set(ranges)) > 10


def test_a_reply_without_a_number_is_a_guess_lost_and_is_told():
    heard: list[str] = []

    def mumble(text):
        heard.append(text)
        return "3.5" if len(heard) == 2 else "hm"

    outcome = guess(mumble, max_guesses=3)
    assert re.fullmatch(r"I think of a whole number from 1 to 100\. Guess it! .*", heard[0])
    assert heard[1:] == ["That is no whole number. Reply with a number from 1 to 100 only."] * 2
    assert outcome.rewards == {"policy": 0.0}
    assert outcome.metrics == {"found": 0.0, "guesses": 3.0, "no_number": 3.0}
    assert guess(lambda _: "9" * 5000, max_guesses=2).metrics["no_number"] == 0.0


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


def test_a_curriculum_makes_later_tasks_harder_by_levels_that_rise_in_equal_stretches():
    assert [num_terms(drawn(Split.TRAIN, index)) for index in (0, 1)] == [2, 2]
    assert max(num_terms(drawn(Split.TRAIN, index)) for index in range(10, 20)) > 4
    assert max(num_terms(drawn(Split.EVAL, index)) for index in range(10)) > 4
    assert max(len(number) for number in re.findall(r"\d+", drawn(Split.TRAIN, 0))) <= 2
    later = drawn(Split.TRAIN, 8)
    assert [drawn(Split.TRAIN, index) for index in (8, 0, 8)] == [later, drawn(Split.TRAIN, 0), later]
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
