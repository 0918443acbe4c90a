"""`guess-number`: find a number in several turns, with "higher" or "lower" after each guess."""

import random
from itertools import islice

from marlaas.environment import Agent, Score, Split, Task
from marlaas.envs.extraction import last_number
from marlaas_api.errors import InvalidInput
from marlaas_api.names import split_of

_SLOWEST_REWARD = 0.5
_MAX_LOOKED_AT = 10_000
_MAX_DIGITS = 100
_MIN_WIDTH = 2


class GuessNumber:
    """Guess a number: after each guess the policy is told whether the number is higher or lower.

    The reward is 1 for a number that is found in as few guesses as halving needs at most, falls to 0.5 at the last guess allowed, and is 0
    for one that is never found. The last number of a reply is the guess; a reply without a number is a guess lost.

    Args:
        low: smallest number.
        high: largest number.
        max_guesses: guesses of one episode; None: twice what halving needs. The job's `rollout.maxTurns` should be as large.
        width: how many consecutive numbers a task has to choose from, anywhere from low to high; None: all of them.
            Short ranges at many places give many different tasks that are all easy.
        turn_reward: reward of each guess that all hints before it allow, as that guess's own (`training.credit`).
    """

    def __init__(
        self,
        low: int = 1,
        high: int = 100,
        max_guesses: int | None = None,
        width: int | None = None,
        turn_reward: float = 0.0,
    ) -> None:
        if not low < high:
            raise InvalidInput(f"guess-number: low is {low} and high is {high}; expected low < high")
        num_numbers = high - low + 1
        self._width = num_numbers if width is None else width
        if not _MIN_WIDTH <= self._width <= num_numbers:
            raise InvalidInput(f"guess-number: width is {width}; expected {_MIN_WIDTH} to {num_numbers} numbers")
        self._low, self._high, self._turn_reward = low, high, turn_reward
        if not self._is_in_both_splits():
            raise InvalidInput(
                f"guess-number: the range {low} to {high} is too small, because some numbers must be held out; widen it"
            )
        self._par = self._width.bit_length()
        self._max_guesses = 2 * self._par if max_guesses is None else max_guesses
        if self._max_guesses < 1:
            raise InvalidInput(f"guess-number: max_guesses is {max_guesses}; expected 1 or more")

    def play(self, task: Task, agent: Agent) -> Score:
        """Play one episode, one guess per turn."""
        low, secret = task.draw(self._range_and_number, lambda drawn: self._text(*drawn))
        high = low + self._width - 1
        message = f"I think of a whole number from {low} to {high}. Guess it! Reply with a number only."
        num_wrong, least, most = 0, low, high
        for guesses in range(1, self._max_guesses + 1):
            reply = agent.say(message)
            guess = _guess(reply.text)
            if self._turn_reward and guess is not None and least <= guess <= most:
                agent.reward_turn(reply, self._turn_reward)
            if guess == secret:
                return Score(self._reward(guesses), self._metrics(1.0, guesses, num_wrong))
            num_wrong += guess is None
            if guess is not None:
                least, most = (max(least, guess + 1), most) if guess < secret else (least, min(most, guess - 1))
            message = _hint(guess, secret, low, high)
        return Score(0.0, self._metrics(0.0, self._max_guesses, num_wrong))

    def _range_and_number(self, rng: random.Random) -> tuple[int, int]:
        low = rng.randint(self._low, self._high - self._width + 1)
        return low, rng.randint(low, low + self._width - 1)

    def _text(self, low: int, number: int) -> str:
        """Return the text whose hash assigns a number of a range to training or held-out tasks."""
        return f"{number} of {low} to {low + self._width - 1}"

    def _is_in_both_splits(self) -> bool:
        tasks = (
            (low, number)
            for low in range(self._low, self._high - self._width + 2)
            for number in range(low, low + self._width)
        )
        return {split_of(self._text(*one)) for one in islice(tasks, _MAX_LOOKED_AT)} == set(Split)

    def _reward(self, guesses: int) -> float:
        late = max(0, guesses - self._par) / max(1, self._max_guesses - self._par)
        return 1.0 - (1.0 - _SLOWEST_REWARD) * late

    @staticmethod
    def _metrics(found: float, guesses: int, num_wrong: int) -> dict[str, float]:
        return {"found": found, "guesses": float(guesses), "no_number": float(num_wrong)}


def _hint(guess: int | None, secret: int, low: int, high: int) -> str:
    if guess is None:
        return f"That is no whole number. Reply with a number from {low} to {high} only."
    return "Higher." if guess < secret else "Lower."


def _guess(reply: str) -> int | None:
    """Return the last number if it is an integer, cut to 100 characters; None otherwise.

    A cut number is still far outside the range, so the hint stays the same.
    """
    number = last_number(reply)
    if number is None or not number.lstrip("-").isdecimal():
        return None
    return int(number[:_MAX_DIGITS])
