"""`guess-number`: hints, rewards, and that some numbers are held out."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from marlaas.environment import EpisodeState, Message, Split, Task, TurnRequest
from marlaas.envs.loading import resolve
from marlaas.envs.playing import Outcome, play_episode
from marlaas.envs.scripted import RecordedReplies
from marlaas_api.errors import InvalidInput


def play(answer: Callable[[str], str], index: int = 0, split: Split = Split.TRAIN, **args: Any) -> Outcome:
    """Play with a policy that answers what it hears."""

    def reply(request: TurnRequest) -> str:
        last = request.append[-1]
        assert isinstance(last, Message)
        return answer(last.content)

    state = EpisodeState(["policy"], RecordedReplies(reply, max_turns=100))
    return play_episode(resolve("guess-number", args).create(), Task(split, index, 7), state)


class Halving:
    """Guesses the middle of what is left, after some wasted guesses."""

    def __init__(self, low: int, high: int, num_wasted: int = 0) -> None:
        self.low, self.high, self.num_wasted = low, high, num_wasted
        self.guess = 0

    def __call__(self, heard: str) -> str:
        if heard == "Higher." and self.guess >= self.low:
            self.low = self.guess + 1
        if heard == "Lower." and self.guess <= self.high:
            self.high = self.guess - 1
        if self.num_wasted:
            self.num_wasted -= 1
            return "well"
        self.guess = (self.low + self.high) // 2
        return f"My guess is {self.guess}."


def secret(index: int, split: Split) -> int:
    halving = Halving(1, 100)
    play(halving, index, split)
    return halving.guess


def test_halving_always_earns_all() -> None:
    outcomes = [play(Halving(1, 100), index) for index in range(40)]
    assert {outcome.rewards["policy"] for outcome in outcomes} == {1.0}
    assert max(outcome.metrics["guesses"] for outcome in outcomes) <= 7


def test_the_reward_falls_with_guesses_beyond_halvings() -> None:
    base = int(play(Halving(1, 100)).metrics["guesses"])
    rewards = {n: play(Halving(1, 100, n)).rewards["policy"] for n in (7 - base, 8 - base, 14 - base, 15 - base)}
    assert rewards == {7 - base: 1.0, 8 - base: pytest.approx(1 - 0.5 / 7), 14 - base: 0.5, 15 - base: 0.0}


def test_a_reply_without_a_number_is_a_guess_lost_and_is_told() -> None:
    heard: list[str] = []

    def mumble(text: str) -> str:
        heard.append(text)
        return "3.5" if len(heard) == 2 else "hm"

    outcome = play(mumble, max_guesses=3)
    assert re.fullmatch(r"I think of a whole number from 1 to 100\. Guess it! .*", heard[0])
    assert heard[1:] == ["That is no whole number. Reply with a number from 1 to 100 only."] * 2
    assert (outcome.rewards, outcome.metrics) == (
        {"policy": 0.0},
        {"found": 0.0, "guesses": 3.0, "no_number": 3.0},
    )


def test_a_huge_number_is_a_guess_like_any_other() -> None:
    assert play(lambda _: "9" * 5000, max_guesses=2).metrics["no_number"] == 0.0


def test_numbers_are_trained_on_or_held_out() -> None:
    trained = {secret(index, Split.TRAIN) for index in range(60)}
    held_out = {secret(index, Split.EVAL) for index in range(60)}
    assert len(trained) > 20
    assert len(held_out) > 5
    assert not trained & held_out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"low": 5, "high": 5}, "expected low < high"),
        ({"high": 2}, "is too small"),
        ({"max_guesses": 0}, "expected 1 or more"),
        ({"hihg": 9}, "did you mean 'high'"),
        ({"low": "1"}, "expected int"),
    ],
)
def test_arguments_that_it_cannot_take(args: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        resolve("guess-number", args).create()
