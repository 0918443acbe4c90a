"""`guess-number`: find a number in several turns, with "higher" or "lower" after each guess."""

from marlaas.environment import Agent, Score, Split, Task
from marlaas.envs.extraction import last_number
from marlaas_api.errors import InvalidInput
from marlaas_api.names import split_of

_SLOWEST_REWARD = 0.5
_MAX_LOOKED_AT = 10_000
_MAX_DIGITS = 100


class GuessNumber:
    """Guess a number: after each guess the policy is told whether the number is higher or lower.

    The reward is 1 for a number that is found in as few guesses as halving needs at most, falls to 0.5 at the last guess allowed, and is 0
    for one that is never found. The last number of a reply is the guess; a reply without a number is a guess lost.

    Args:
        low: smallest number.
        high: largest number.
        max_guesses: guesses of one episode; None: twice what halving needs. The job's `rollout.maxTurns` should be as large.
    """

    def __init__(self, low: int = 1, high: int = 100, max_guesses: int | None = None) -> None:
        if not low < high:
            raise InvalidInput(f"guess-number: low is {low} and high is {high}; expected low < high")
        if not _in_both_splits(low, high):
            raise InvalidInput(
                f"guess-number: the range {low} to {high} is too small, because some numbers must be held out; widen it"
            )
        self._low, self._high = low, high
        self._par = (high - low + 1).bit_length()
        self._max_guesses = 2 * self._par if max_guesses is None else max_guesses
        if self._max_guesses < 1:
            raise InvalidInput(f"guess-number: max_guesses is {max_guesses}; expected 1 or more")

    def play(self, task: Task, agent: Agent) -> Score:
        """Play one episode, one guess per turn."""
        secret = task.draw(lambda rng: rng.randint(self._low, self._high), lambda n: _text(self._low, self._high, n))
        message = f"I think of a whole number from {self._low} to {self._high}. Guess it! Reply with a number only."
        num_wrong = 0
        for guesses in range(1, self._max_guesses + 1):
            guess = _guess(agent.say(message).text)
            if guess == secret:
                return Score(self._reward(guesses), self._metrics(1.0, guesses, num_wrong))
            num_wrong += guess is None
            message = self._hint(guess, secret)
        return Score(0.0, self._metrics(0.0, self._max_guesses, num_wrong))

    def _hint(self, guess: int | None, secret: int) -> str:
        if guess is None:
            return f"That is no whole number. Reply with a number from {self._low} to {self._high} only."
        return "Higher." if guess < secret else "Lower."

    def _reward(self, guesses: int) -> float:
        late = max(0, guesses - self._par) / max(1, self._max_guesses - self._par)
        return 1.0 - (1.0 - _SLOWEST_REWARD) * late

    @staticmethod
    def _metrics(found: float, guesses: int, num_wrong: int) -> dict[str, float]:
        return {"found": found, "guesses": float(guesses), "no_number": float(num_wrong)}


def _guess(reply: str) -> int | None:
    """Return the last number if it is an integer, cut to 100 characters; None otherwise.

    A cut number is still far outside the range, so the hint stays the same.
    """
    number = last_number(reply)
    if number is None or not number.lstrip("-").isdecimal():
        return None
    return int(number[:_MAX_DIGITS])


def _in_both_splits(low: int, high: int) -> bool:
    looked_at = range(low, min(high, low + _MAX_LOOKED_AT) + 1)
    return {split_of(_text(low, high, number)) for number in looked_at} == set(Split)


def _text(low: int, high: int, number: int) -> str:
    """Return the text whose hash assigns a number to training or held-out tasks."""
    return f"{number} of {low} to {high}"
