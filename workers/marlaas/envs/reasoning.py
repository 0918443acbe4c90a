"""`reasoning-gym`: any dataset of the package reasoning-gym (a hundred kinds of puzzles with checkable answers), in one turn."""

import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from marlaas.environment import Agent, Message, Score, Task
from marlaas.envs.extraction import extractor
from marlaas.envs.loading import nearest
from marlaas_api.errors import InvalidInput

_SHAPING = ("exact", "format")


class _Dataset(Protocol):
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


@dataclass(frozen=True, slots=True)
class _Puzzle:
    dataset: _Dataset
    entry: dict[str, Any]

    @property
    def question(self) -> str:
        return str(self.entry["question"])

    def score(self, answer: str | None) -> float:
        """1 for the dataset's own answer, else what the dataset gives for it, 0 to 1."""
        if answer is None:
            return 0.0
        if answer == self.entry["answer"]:
            return 1.0
        return min(1.0, max(0.0, float(self.dataset.score_answer(answer, self.entry))))


class ReasoningGym:
    """A dataset of the package reasoning-gym, by name.

    Every task is drawn with a seed of its own; a question is trained on or held out by a hash of its text, never both.

    Args:
        dataset: name in reasoning-gym, for example chain_sum.
        config: arguments of the dataset, for example {max_digits: 2}.
        answer: where the answer is: last_number, boxed, tag (<answer>…</answer>), regex, or whole reply.
        pattern: the regular expression for answer: regex; its first group is the answer.
        system: system prompt.
        suffix: text after the question, for example "Answer with the number only."
        shaping: shares of the reward kept for form, {exact: 0.2} for replies that are the right answer and nothing else,
            {format: 0.1} for any reply that is an answer in the asked form.
    """

    def __init__(  # noqa: PLR0913
        self,
        dataset: str,
        config: dict[str, Any] | None = None,
        answer: str = "last_number",
        pattern: str | None = None,
        system: str | None = None,
        suffix: str = "",
        shaping: dict[str, float] | None = None,
    ) -> None:
        self._dataset = dataset
        self._config = config or {}
        self._extract = extractor(answer, pattern)
        self._is_delimited = answer in ("boxed", "tag", "regex")
        self._system = (Message("system", system),) if system else ()
        self._suffix = suffix
        self._shaping = _checked_shaping(shaping or {})
        self._create = _creator(dataset, self._config)

    def play(self, task: Task, agent: Agent) -> Score:
        """One turn."""
        puzzle = task.draw(self._draw, lambda puzzle: puzzle.question)
        reply = agent.ask((*self._system, Message("user", puzzle.question + self._suffix))).text
        answer = self._extract(reply)
        correct = puzzle.score(answer)
        bare = answer is not None and reply.strip() == answer
        formed = float(answer is not None and (bare or self._is_delimited))
        exact, form = self._shaping["exact"], self._shaping["format"]
        reward = (1 - exact - form) * correct + exact * correct * bare + form * formed
        return Score(reward, {"correct": correct, "formed": formed})

    def _draw(self, rng: random.Random) -> _Puzzle:
        dataset = self._create(rng.getrandbits(31))
        return _Puzzle(dataset, dataset[0])


class _Create(Protocol):
    def __call__(self, seed: int) -> _Dataset: ...


def _creator(name: str, config: Mapping[str, Any]) -> _Create:
    """Return what makes the dataset from a seed, after trying it once. Raises InvalidInput."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    if name not in DATASETS:
        raise InvalidInput(f"reasoning-gym has no dataset {name!r}{nearest(name, DATASETS)}")
    _check_config(name, DATASETS[name][1], config)

    def create(seed: int) -> _Dataset:
        dataset: _Dataset = reasoning_gym.create_dataset(name, **{**config, "seed": seed, "size": 1})
        return dataset

    try:
        create(0)
    except Exception as error:
        raise InvalidInput(
            f"reasoning-gym's dataset {name!r} refuses its config: {type(error).__name__}: {error}"
        ) from error
    return create


def _check_config(name: str, kind: type, config: Mapping[str, Any]) -> None:
    known = [field for field in getattr(kind, "__dataclass_fields__", {}) if field not in ("seed", "size")]
    for key in config:
        if key not in known:
            raise InvalidInput(
                f"reasoning-gym's dataset {name!r} has no argument {key!r}{nearest(key, known)}; it takes {', '.join(known)}"
            )


def _checked_shaping(shaping: Mapping[str, float]) -> dict[str, float]:
    for key, value in shaping.items():
        if key not in _SHAPING:
            raise InvalidInput(f"shaping has no {key!r}{nearest(key, _SHAPING)}; it takes {', '.join(_SHAPING)}")
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InvalidInput(f"shaping {key!r} is {value!r}; expected a share from 0 to 1")
    if sum(shaping.values()) > 1:
        raise InvalidInput(f"shaping shares add up to {sum(shaping.values())}; expected at most 1")
    return {key: float(shaping.get(key, 0.0)) for key in _SHAPING}
