"""Evaluation: when a job is evaluated, and the results. Every version plays the same held-out tasks with the same seeds."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from marlaas_api.messages import Episode, EvalRecord
from marlaas_api.messages.job_spec import EvaluationSettings


def due(spec: EvaluationSettings, finished: int, steps: int) -> bool:
    """Return whether the version after `finished` steps is evaluated: the first, the last, and after every `every` steps."""
    return spec.tasks > 0 and (finished == 0 or finished >= steps or finished % spec.every == 0)


@dataclass(slots=True)
class EvaluationRun:
    """One version under evaluation: the sum of the agents' `versions`.

    Attributes:
        step: number of finished steps after which its versions were the newest; it may begin later.
        episodes: by task index; the first record of a task counts.
    """

    version: int
    step: int
    num_tasks: int
    versions: Mapping[str, int]
    episodes: dict[int, Episode] = field(default_factory=dict)

    def add(self, episode: Episode) -> bool:
        """Add an episode, unless its task has one; return whether it was added."""
        return self.episodes.setdefault(episode.index, episode) is episode

    @property
    def complete(self) -> bool:
        """Whether every task has ended."""
        return len(self.episodes) == self.num_tasks

    def scored(self) -> list[Episode]:
        """Return the episodes without a fault, in task order."""
        return [self.episodes[index] for index in sorted(self.episodes) if self.episodes[index].fault is None]

    def rewards(self, agents: Sequence[str]) -> dict[str, float]:
        """Return each agent's mean reward over the episodes without a fault whose task may call it; no entry if there are none."""
        scored = self.scored()
        called = {agent: [one for one in scored if one.may_call(agent)] for agent in agents}
        return {
            agent: statistics.fmean(one.rewards.get(agent, 0.0) for one in own) for agent, own in called.items() if own
        }

    def team_reward(self, agents: Sequence[str]) -> float:
        """Return the mean of `team_reward` over the episodes without a fault; NaN if none has one."""
        found = [team_reward(one, agents) for one in self.scored()]
        known = [reward for reward in found if not math.isnan(reward)]
        return statistics.fmean(known) if known else math.nan

    def metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the episodes that have it."""
        values: dict[str, list[float]] = {}
        for episode in self.scored():
            for name, value in episode.metrics.items():
                values.setdefault(name, []).append(value)
        return {name: sum(some) / len(some) for name, some in values.items()}


def evaluated_text(record: EvalRecord) -> str:
    """Return an evaluation for people; with its number of distinct tasks, where some are played more than once."""
    text = f"version {record.version}: mean reward {record.reward_mean:.3f}"
    is_repeated = 0 < record.num_prompts < record.num_episodes
    return f"{text} over {record.num_episodes} episodes of {record.num_prompts} distinct tasks" if is_repeated else text


def without_samples(record: EvalRecord) -> EvalRecord:
    """Return what decisions need of a record: a job keeps all of them, and the texts of its samples are large."""
    return record.model_copy(update={"samples": (), "metrics": {}})


class EvaluationSchedule:
    """Decides which evaluation of a job is next. An evaluation that a pause or a quick next step has delayed is made later.

    A strict job evaluates the versions after each due step, so that its evaluations depend on its seed alone. Other jobs
    evaluate version 0 first, and then the newest versions once a due step is on record.
    """

    def __init__(self, agents: Iterable[str], *, strict: bool) -> None:
        self._strict = strict
        self._missing: dict[int, Mapping[str, int]] = {0: dict.fromkeys(agents, 0)}

    def note(self, spec: EvaluationSettings, finished: int, steps: int, versions: Mapping[str, int]) -> None:
        """Note the versions after `finished` steps, which are on record. steps: of the job."""
        if due(spec, finished, steps):
            self._missing[finished] = dict(versions)

    def next(
        self, num_tasks: int, known: Mapping[int, EvalRecord], finished: int, newest: Mapping[str, int]
    ) -> EvaluationRun | None:
        """Return the next evaluation; None if none is due.

        Args:
            known: recorded evaluations by version. A version is evaluated once.
            finished: number of recorded steps.
            newest: versions by agent.
        """
        last = max((one.step for one in known.values()), default=-1)
        for step, versions in list(self._missing.items()):
            if step <= last or sum(versions.values()) in known:
                del self._missing[step]
        is_exact = self._strict or not known
        found = self._missing if is_exact else dict.fromkeys([finished] if self._missing else [], newest)
        runs = (EvaluationRun(sum(versions.values()), step, num_tasks, versions) for step, versions in found.items())
        return next((run for run in runs if num_tasks > 0 and run.version not in known), None)


def team_reward(episode: Episode, agents: Sequence[str]) -> float:
    """Return an episode's mean reward over those of the `agents` that its task may call; NaN if it may call none of them."""
    rewards = [episode.rewards.get(agent, 0.0) for agent in agents if episode.may_call(agent)]
    return statistics.fmean(rewards) if rewards else math.nan


def best(records: dict[int, float], last: int, promote: str) -> int:
    """Return the version to promote: the last one, or the one with the highest evaluation (the later of equals).

    An evaluation whose episodes all ended in faults (NaN) is ignored.
    """
    known = {version: reward for version, reward in records.items() if not math.isnan(reward)}
    if promote == "last" or not known:
        return last
    return max(known, key=lambda version: (known[version], version))
