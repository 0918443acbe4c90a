"""When a job is evaluated, and on what: the same held-out tasks with the same seeds at every version."""

import math
from dataclasses import dataclass, field

from marlaas_api.kinds import EvaluationSpec
from marlaas_api.messages import Episode


def due(spec: EvaluationSpec, finished: int, steps: int) -> bool:
    """Whether the version after `finished` steps is evaluated: the first, the last, and every `every` steps."""
    return spec.tasks > 0 and (finished == 0 or finished >= steps or finished % spec.every == 0)


@dataclass(slots=True)
class EvaluationRun:
    """One version under evaluation: episodes by task index; the first record of a task counts."""

    version: int
    step: int
    num_tasks: int
    episodes: dict[int, Episode] = field(default_factory=dict)

    def add(self, episode: Episode) -> None:
        """Note an episode."""
        self.episodes.setdefault(episode.index, episode)

    @property
    def complete(self) -> bool:
        """Every task has ended."""
        return len(self.episodes) == self.num_tasks

    def scored(self) -> list[Episode]:
        """Episodes that count, in task order."""
        return [self.episodes[index] for index in sorted(self.episodes) if self.episodes[index].fault is None]

    def reward_mean(self, agent: str) -> float:
        """Mean reward over the episodes that count; NaN if none does."""
        rewards = [episode.rewards[agent] for episode in self.scored()]
        return sum(rewards) / len(rewards) if rewards else float("nan")

    def metrics(self) -> dict[str, float]:
        """Mean of every metric over the episodes that have it."""
        values: dict[str, list[float]] = {}
        for episode in self.scored():
            for name, value in episode.metrics.items():
                values.setdefault(name, []).append(value)
        return {name: sum(some) / len(some) for name, some in values.items()}


def best(records: dict[int, float], last: int, promote: str) -> int:
    """The version to publish: the last, or the one with the highest evaluation (the later of equals).

    An evaluation of which every episode was lost to faults (NaN) says nothing, also against none.
    """
    known = {version: reward for version, reward in records.items() if not math.isnan(reward)}
    if promote == "last" or not known:
        return last
    return max(known, key=lambda version: (known[version], version))
