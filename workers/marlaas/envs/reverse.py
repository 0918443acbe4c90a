"""`reverse`: spell a word backwards, in one turn. The task of the builtin model `tiny`."""

from marlaas.environment import Agent, Score, Task
from marlaas.models.curriculum import MAX_LETTERS, MIN_LETTERS, ReverseTask, reverse_task
from marlaas_api.errors import InvalidInput
from marlaas_api.names import derive_seed


class Reverse:
    """Spell a word backwards: `reverse: abcd` wants `dcba`.

    Args:
        min_length: letters of the shortest word, 3 to 5.
        max_length: letters of the longest word, 3 to 5.
        partial: give the share of right letters instead of 1 or 0.
    """

    def __init__(self, min_length: int = MIN_LETTERS, max_length: int = MAX_LETTERS, partial: bool = False) -> None:
        if not MIN_LETTERS <= min_length <= max_length <= MAX_LETTERS:
            raise InvalidInput(
                f"reverse: {min_length} to {max_length} letters; words have {MIN_LETTERS} to {MAX_LETTERS} letters"
            )
        self._lengths = range(min_length, max_length + 1)
        self._partial = partial

    def play(self, task: Task, agent: Agent) -> Score:
        """Play one episode of one turn."""
        puzzle = self._puzzle(task)
        reply = agent.say(puzzle.prompt).text.strip()
        exact = float(reply == puzzle.answer)
        return Score(_share(reply, puzzle.answer) if self._partial else exact, {"exact": exact})

    def _puzzle(self, task: Task) -> ReverseTask:
        seed = derive_seed(task.seed, task.index)
        while True:
            puzzle = reverse_task(task.split, seed)
            if len(puzzle.word) in self._lengths:
                return puzzle
            seed += 1


def _share(reply: str, answer: str) -> float:
    right = sum(a == b for a, b in zip(reply, answer, strict=False))
    return right / max(len(reply), len(answer))
