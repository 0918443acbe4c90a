"""Puzzles of the package reasoning-gym, drawn for tasks at the levels of a curriculum. The only module that imports the package.

A task depends only on (split, index, seed). A level rises with the index, never with the policy's success, so that
a resumed or repeated job gets the same tasks. Held-out tasks all have the last level, so that evaluations can be
compared.
"""

import math
import random
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from marlaas.environment import Agent, Task, ToolError
from marlaas.envs.loading import nearest
from marlaas_api.errors import InvalidInput
from marlaas_api.names import Split

_NUM_ENDS = 2


@dataclass(frozen=True, slots=True)
class LevelSchedule:
    """Raises each attribute from its first to its last level in equal intervals over `num_tasks` training tasks."""

    ends: Mapping[str, tuple[int, int]]
    num_tasks: int

    def at(self, split: Split, index: int) -> dict[str, int]:
        """Return each attribute's level for a task."""
        if split == Split.EVAL or index >= self.num_tasks:
            return {name: last for name, (_, last) in self.ends.items()}
        return {n: first + index * (last - first + 1) // self.num_tasks for n, (first, last) in self.ends.items()}

    def all(self) -> list[dict[str, int]]:
        """Return the combinations of levels that training goes through, easiest first."""
        found: list[dict[str, int]] = []
        for index in range(self.num_tasks + 1):
            levels = self.at(Split.TRAIN, index)
            if levels not in found[-1:]:
                found.append(levels)
        return found


def checked_levels(
    what: str, given: Mapping[str, object], num_tasks: int, num_levels: Mapping[str, int]
) -> LevelSchedule:
    """Return the schedule for `curriculum: {attribute: level or [first, last]}`. Raises InvalidInput.

    `num_levels` gives the number of levels of each attribute.
    """
    if num_tasks < 0:
        raise InvalidInput(f"curriculum_tasks is {num_tasks}; expected 0 or more tasks")
    ends = {name: _level_range(what, name, value, num_levels) for name, value in given.items()}
    if num_tasks == 0 and (rising := [name for name, (first, last) in ends.items() if first < last]):
        raise InvalidInput(
            f"curriculum {rising[0]!r} rises; set curriculum_tasks to the number of training tasks over which it does"
        )
    return LevelSchedule(ends, num_tasks)


def _level_range(what: str, name: str, value: object, num_levels: Mapping[str, int]) -> tuple[int, int]:
    if name not in num_levels:
        raise InvalidInput(
            f"the curriculum of {what} has no attribute {name!r}{nearest(name, num_levels)}; it has {', '.join(num_levels)}"
        )
    ends: list[Any] = list(value) if isinstance(value, list | tuple) else [value, value]
    highest = num_levels[name] - 1
    if (
        len(ends) != _NUM_ENDS
        or not all(type(level) is int for level in ends)
        or not 0 <= ends[0] <= ends[1] <= highest
    ):
        raise InvalidInput(f"curriculum {name!r} is {value!r}; expected a level from 0 to {highest}, or [first, last]")
    return ends[0], ends[1]


_COMPOSITE = "composite"
_MAX_SCORING_S = 20.0
_OURS = ("seed", "size")


class _Dataset(Protocol):
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One question with its scoring, and the curriculum levels that it was generated at."""

    dataset: _Dataset
    entry: dict[str, Any]
    levels: Mapping[str, int]

    @property
    def question(self) -> str:
        """The question's text."""
        return str(self.entry["question"])

    def score(self, agent: Agent, answer: str | None) -> float:
        """Return 1 for the dataset's own answer, else the dataset's score for `answer`, 0 to 1.

        Datasets parse answers, some as mathematics. An answer that makes the parser fail or run longer than 20 s is
        the policy's doing and scores 0.
        """
        if answer is None:
            return 0.0
        if answer == self.entry["answer"]:
            return 1.0
        is_main = threading.current_thread() is threading.main_thread()
        try:
            with agent.tool(timeout_s=_MAX_SCORING_S if is_main else None):
                given = float(self.dataset.score_answer(answer, self.entry))
        except ToolError:
            return 0.0
        return min(1.0, max(0.0, given)) if math.isfinite(given) else 0.0

    def metrics(self) -> dict[str, float]:
        """Return `level_<attribute>` for every attribute in the manifest's curriculum."""
        return {f"level_{name}": float(level) for name, level in self.levels.items()}


class Puzzles:
    """A dataset by name, with the config and curriculum of the manifest. Raises InvalidInput."""

    def __init__(
        self, dataset: str, config: Mapping[str, Any], curriculum: Mapping[str, object], curriculum_tasks: int
    ) -> None:
        self._name = dataset
        self._config = _checked_config(dataset, config)
        self._levels = self._checked_levels(curriculum, curriculum_tasks)
        for levels in self._levels.all():
            self._try(levels)

    def draw(self, task: Task) -> Puzzle:
        """Return the task's puzzle. Each has its own seed; a hash of the question's text assigns it to a split."""
        levels = self._levels.at(task.split, task.index)
        config = self._at(levels)

        def generate(rng: random.Random) -> Puzzle:
            dataset = _create(self._name, config, rng.getrandbits(31))
            return Puzzle(dataset, dataset[0], levels)

        return task.draw(generate, lambda puzzle: puzzle.question)

    def _checked_levels(self, curriculum: Mapping[str, object], num_tasks: int) -> LevelSchedule:
        if not curriculum:
            return LevelSchedule({}, 0)
        what = f"reasoning-gym's dataset {self._name!r}"
        if self._name not in _gym().CURRICULA:
            raise InvalidInput(f"{what} has no curriculum; its config sets the difficulty")
        attributes = _gym().CURRICULA[self._name]().attributes
        levels = checked_levels(what, curriculum, num_tasks, {n: len(a.levels) for n, a in attributes.items()})
        for name in curriculum:
            for field in _fields(attributes[name]):
                if field in self._config:
                    raise InvalidInput(
                        f"config sets {field!r}, and so does the curriculum's {name!r}: give one of them"
                    )
        return levels

    def _at(self, levels: Mapping[str, int]) -> dict[str, Any]:
        """Return the config at these levels.

        Attributes that the manifest does not name have their first level, unless the config sets them.
        """
        if not levels:
            return self._config
        curriculum = _gym().CURRICULA[self._name]()
        for name, level in levels.items():
            curriculum.set_attr_level(name, level)
        made = curriculum.generate_configuration()
        fields = [field for attribute in curriculum.attributes.values() for field in _fields(attribute)]
        return {**{field: getattr(made, field) for field in fields}, **self._config}

    def _try(self, levels: Mapping[str, int]) -> None:
        at = f" at the levels {dict(levels)}" if levels else ""
        try:
            _create(self._name, self._at(levels), 0)
        except Exception as error:
            raise InvalidInput(
                f"reasoning-gym's dataset {self._name!r} rejects its config{at}: {type(error).__name__}: {error}"
            ) from error


@lru_cache(maxsize=1)
def _gym() -> Any:
    """Return the package's registry of datasets and curricula; importing it takes a second."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym
    return reasoning_gym.factory


def dataset_names() -> list[str]:
    """Return the names of all datasets."""
    return sorted(_gym().DATASETS)


def _create(name: str, config: Mapping[str, Any], seed: int) -> _Dataset:
    dataset: _Dataset = _gym().create_dataset(name, **{**config, "seed": seed, "size": 1})
    return dataset


def _fields(attribute: Any) -> list[str]:
    """Return the config fields that a curriculum attribute sets."""
    if hasattr(attribute, "field_name"):
        return [attribute.field_name]
    return [attribute.lower_field_name, attribute.upper_field_name]


def _checked_config(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    datasets = _gym().DATASETS
    if name not in datasets:
        raise InvalidInput(f"reasoning-gym has no dataset {name!r}{nearest(name, datasets)}")
    known = [field for field in getattr(datasets[name][1], "__dataclass_fields__", {}) if field not in _OURS]
    for key in config:
        if key not in known:
            raise InvalidInput(
                f"reasoning-gym's dataset {name!r} has no argument {key!r}{nearest(key, known)}; it takes {', '.join(known)}"
            )
    return {**config, "datasets": _parts(config)} if name == _COMPOSITE else dict(config)


def _parts(config: Mapping[str, Any]) -> list[Any]:
    """Parse the datasets of a composite, each {name, weight, config}. Raises InvalidInput."""
    from reasoning_gym.composite import DatasetSpec

    parts = []
    for part in config.get("datasets") or []:
        if not isinstance(part, Mapping) or "name" not in part or set(part) - {"name", "weight", "config"}:
            raise InvalidInput(f"a dataset of reasoning-gym's composite is {part!r:.80}; expected name, weight, config")
        inner = _checked_config(str(part["name"]), part.get("config") or {})
        parts.append(DatasetSpec(name=str(part["name"]), weight=float(part.get("weight", 1.0)), config=inner))
    if not parts:
        raise InvalidInput("reasoning-gym's composite needs its config: datasets, a list of {name, weight, config}")
    return parts
