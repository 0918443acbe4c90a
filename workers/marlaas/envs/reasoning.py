"""`reasoning-gym`: any dataset of the package reasoning-gym (a hundred kinds of puzzles with checkable answers), in one turn."""

from collections.abc import Mapping
from typing import Any

from marlaas.environment import Agent, Message, Score, Task
from marlaas.envs.extraction import extractor
from marlaas.envs.loading import nearest
from marlaas.envs.puzzles import Puzzles
from marlaas_api.errors import InvalidInput

_SHAPING = ("exact", "format")


class ReasoningGym:
    """A dataset of the package reasoning-gym, by name.

    Every task is drawn with its own seed. A hash of the question's text assigns it to training or held-out tasks,
    never both.

    Args:
        dataset: name in reasoning-gym, for example chain_sum.
        config: arguments of the dataset, for example {max_digits: 2}.
        curriculum: levels of the dataset's own curriculum, {attribute: level} or {attribute: [first, last]}.
        curriculum_tasks: training tasks over which levels rise from first to last; held-out tasks have the last.
        answer: where the answer is: last_number, boxed, tag (<answer>…</answer>), regex, or whole reply.
        pattern: the regular expression for answer: regex; its first group is the answer.
        system: system prompt.
        suffix: text after the question, for example "Answer with the number only."
        shaping: shares of the reward for form. {exact: 0.2} is for replies that are the right answer and nothing
            else, {format: 0.1} for any reply with an answer in the requested form.
    """

    def __init__(  # noqa: PLR0913
        self,
        dataset: str,
        config: dict[str, Any] | None = None,
        curriculum: dict[str, Any] | None = None,
        curriculum_tasks: int = 0,
        answer: str = "last_number",
        pattern: str | None = None,
        system: str | None = None,
        suffix: str = "",
        shaping: dict[str, float] | None = None,
    ) -> None:
        self._puzzles = Puzzles(dataset, config or {}, curriculum or {}, curriculum_tasks)
        self._extract = extractor(answer, pattern)
        self._is_delimited = answer in ("boxed", "tag", "regex")
        self._system = (Message("system", system),) if system else ()
        self._suffix = suffix
        self._shaping = _checked_shaping(shaping or {})

    def play(self, task: Task, agent: Agent) -> Score:
        """Play one episode of one turn."""
        puzzle = self._puzzles.draw(task)
        reply = agent.ask((*self._system, Message("user", puzzle.question + self._suffix))).text
        answer = self._extract(reply)
        correct = puzzle.score(agent, answer)
        bare = answer is not None and reply.strip() == answer
        formed = float(answer is not None and (bare or self._is_delimited))
        exact, form = self._shaping["exact"], self._shaping["format"]
        reward = (1 - exact - form) * correct + exact * correct * bare + form * formed
        return Score(reward, {"correct": correct, "formed": formed, **puzzle.metrics()})


def _checked_shaping(shaping: Mapping[str, float]) -> dict[str, float]:
    for key, value in shaping.items():
        if key not in _SHAPING:
            raise InvalidInput(f"shaping has no {key!r}{nearest(key, _SHAPING)}; it takes {', '.join(_SHAPING)}")
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InvalidInput(f"shaping {key!r} is {value!r}; expected a share from 0 to 1")
    if sum(shaping.values()) > 1:
        raise InvalidInput(f"shaping shares add up to {sum(shaping.values())}; expected at most 1")
    return {key: float(shaping.get(key, 0.0)) for key in _SHAPING}
