"""Difficulty levels: the level of each curriculum attribute for a task. Pure arithmetic on the task's index.

A task depends only on (split, index, seed). A level rises with the index, never with the policy's success, so that
a resumed or repeated job gets the same tasks. Held-out tasks all have the last level, so that evaluations can be
compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    ends = {name: _ends(what, name, value, num_levels) for name, value in given.items()}
    if num_tasks == 0 and (rising := [name for name, (first, last) in ends.items() if first < last]):
        raise InvalidInput(f"curriculum {rising[0]!r} rises, so curriculum_tasks must say over how many training tasks")
    return LevelSchedule(ends, num_tasks)


def _ends(what: str, name: str, value: object, num_levels: Mapping[str, int]) -> tuple[int, int]:
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
