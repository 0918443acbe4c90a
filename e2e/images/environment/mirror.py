"""An environment that is in this image and nowhere else: spell a word of the team's secret letters backwards."""

import os
import random
import time

from marlaas.environment import Agent, Score, Task

LETTERS_VARIABLE = "MIRROR_LETTERS"


class Mirror:
    """Spell a word backwards.

    Args:
        length: letters of a word.
    """

    def __init__(self, length: int = 3) -> None:
        self._letters = os.environ[LETTERS_VARIABLE]
        self._length = length

    def play(self, task: Task, agent: Agent) -> Score:
        """One turn, and a moment of other work, so that many such jobs leave the processors free."""
        time.sleep(1.0)
        word = task.draw(self._word)
        reply = agent.say(f"reverse: {word}").text.strip()
        return Score(float(reply == word[::-1]), {"letters": float(len(self._letters))})

    def _word(self, rng: random.Random) -> str:
        return "".join(rng.choices(self._letters, k=self._length))
