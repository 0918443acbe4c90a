"""Select episodes and add their context from the run's records: step, advantage, rewards of their group. Pure."""

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from marlaas.episodes.record import EpisodeRecord
from marlaas_api.messages import Choice, JobSpec, StepRecord
from marlaas_api.messages.agent_settings import AgentSettings
from marlaas_api.names import Split, group_token
from marlaas_worker.rl.advantages import Estimator, advantages, overlong_penalty
from marlaas_worker.rl.algorithms import ALGORITHMS


@dataclass(frozen=True, slots=True)
class Comparison:
    """How rewards become advantages, as the trainer computes them.

    Attributes:
        over_group: rewards are compared within a group; otherwise a group alone does not give its advantages.
        has_baseline: rewards of episodes are compared with a running mean of the agent.
        overlong: the last tokens up to max_tokens over which the penalty for long replies grows.
    """

    estimator: Estimator | Literal["teacher"]
    over_group: bool = True
    has_baseline: bool = False
    max_tokens: int = 0
    overlong: int = 0

    def of_members(
        self, members: Sequence[EpisodeRecord], agent: AgentSettings, baseline: float | None
    ) -> Sequence[float]:
        """Return an agent's advantages in the members of a group [G]; empty if they are not known.

        Args:
            baseline: the agent's running mean at the step that trains the group; None if that is not known.
        """
        rewards = [one.trained_reward(agent) + self._penalty(_longest(one, agent.name)) for one in members]
        if self.has_baseline:
            return [] if baseline is None else [reward - baseline for reward in rewards]
        if self.estimator == "teacher" or not self.over_group or len(rewards) < 2:
            return []
        return advantages(self.estimator, rewards)

    def of_candidates(self, record: EpisodeRecord, choice: Choice) -> Sequence[float]:
        """Return the advantages of the candidates of a choice, which are compared with each other; empty if they are not known."""
        sizes = {turn.turn: len(turn.output_ids) for turn in record.turns if turn.agent == choice.agent}
        pairs = zip(choice.turns, choice.rewards, strict=False)
        rewards = [reward + self._penalty(sizes.get(turn, 0)) for turn, reward in pairs]
        return advantages(self.estimator, rewards) if self.estimator != "teacher" and len(rewards) > 1 else []

    def _penalty(self, num_tokens: int) -> float:
        return overlong_penalty(num_tokens, self.max_tokens, self.overlong)


def comparison_of(spec: JobSpec) -> Comparison:
    """Return how a job compares rewards."""
    rule = ALGORITHMS[spec.training.algorithm]
    return Comparison(
        estimator=rule.advantage,
        over_group=rule.over == "group" and not spec.training.credits_turns,  # else each turn has its own
        has_baseline=spec.training.has_running_baseline,
        max_tokens=spec.rollout.max_tokens,
        overlong=spec.training.overlong.tokens,
    )


_BASELINE = "baseline"


class EpisodeOrder(StrEnum):
    """Order in which episodes are shown."""

    LATEST = "latest"
    WORST = "worst"
    BEST = "best"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Played:
    """An episode with its context.

    step: the step that resolved it, counted from 0; None if that step has not ended, or the task is held out.
    group_rewards: per agent, the rewards of the members without a fault, in member order.
    advantages: per agent, this episode's own advantage, if its group is complete.
    candidates: by agent and turn, the advantage of a candidate.
    """

    job: str
    record: EpisodeRecord
    step: int | None = None
    group_rewards: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    advantages: Mapping[str, float] = field(default_factory=dict)
    candidates: Mapping[tuple[str, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """Criteria for the episodes to show. None and False do not restrict."""

    step: int | None = None
    split: Split | None = None
    faults: bool = False
    order: EpisodeOrder = EpisodeOrder.LATEST
    limit: int = 5


@dataclass(frozen=True, slots=True)
class JobContext:
    """Context of a job's episodes. steps: the finished ones, in order."""

    job: str
    group_size: int
    comparison: Comparison
    steps: Sequence[StepRecord] = ()
    agents: Sequence[AgentSettings] = ()

    def baselines(self) -> dict[str, dict[int, float]]:
        """Return, by agent and step, the running mean with which the step compared rewards: that after the step before, at first 0.

        The metrics of a step have the values after it (`marlaas_worker.trainer.weighing.Baselines`).
        """
        is_alone = sum(agent.policy is None for agent in self.agents) == 1
        found: dict[str, dict[int, float]] = {}
        for agent in self.agents:
            name = _BASELINE if agent.policy is None else f"{_BASELINE}_{agent.name}"
            key, value = name if is_alone else f"{agent.policy_name}/{name}", 0.0
            found[agent.name] = {}
            for step in self.steps:
                found[agent.name][step.step] = value
                value = step.metrics.get(key, value)
        return found


def placed(records: Iterable[EpisodeRecord], around: JobContext) -> list[Played]:
    """Return every episode with its context, in the given order."""
    all_records = list(records)
    groups: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in all_records:
        groups[record.group].append(record)
    step_of = {f"t{index}": step.step for step in around.steps for index in step.indices}
    baselines = around.baselines() if around.comparison.has_baseline else {}
    own: dict[str, dict[str, float]] = {}
    for name, group in groups.items():
        step = step_of.get(group_token(name))
        own |= _advantages(
            group, around, {agent: of.get(step) for agent, of in baselines.items()} if step is not None else {}
        )
    return [
        Played(
            around.job,
            record,
            step_of.get(group_token(record.group)),
            _rewards(groups[record.group]),
            own.get(record.episode, {}),
            _candidates(record, around),
        )
        for record in all_records
    ]


def chosen(episodes: Iterable[Played], choice: EpisodeFilter, rng: random.Random) -> list[Played]:
    """Return at most `limit` episodes. The latest are returned in time order.

    Worst and best are by mean reward; episodes without one (faults) come last.
    """
    fitting = [one for one in episodes if _fits(one, choice)]
    if choice.order is EpisodeOrder.LATEST:
        return sorted(fitting, key=lambda one: one.record.at)[max(0, len(fitting) - choice.limit) :]
    if choice.order is EpisodeOrder.RANDOM:
        return rng.sample(fitting, min(choice.limit, len(fitting)))
    sign = 1.0 if choice.order is EpisodeOrder.WORST else -1.0
    return sorted(fitting, key=lambda one: _rank(one, sign))[: choice.limit]


def _fits(one: Played, choice: EpisodeFilter) -> bool:
    return (
        (choice.step is None or one.step == choice.step)
        and (choice.split is None or one.record.split is choice.split)
        and (not choice.faults or one.record.fault is not None or bool(one.record.prior_faults))
    )


def _rank(one: Played, sign: float) -> tuple[bool, float, float]:
    reward = one.record.reward
    return (reward is None, 0.0 if reward is None else sign * reward, -one.record.at)


def _rewards(group: Sequence[EpisodeRecord]) -> dict[str, tuple[float, ...]]:
    counting = sorted((one for one in group if one.fault is None), key=lambda one: one.member)
    agents = dict.fromkeys(agent for one in counting for agent in one.rewards)
    return {agent: tuple(one.rewards[agent] for one in counting if agent in one.rewards) for agent in agents}


def _advantages(
    group: Sequence[EpisodeRecord], around: JobContext, baselines: Mapping[str, float | None]
) -> dict[str, dict[str, float]]:
    """Return each member's advantages by trained agent, once all members have ended. Held-out tasks have none.

    An episode in which an agent has only candidates is not trained with its reward.
    """
    if len(group) < around.group_size or group[0].split is Split.EVAL:
        return {}
    counting = sorted((one for one in group if one.fault is None), key=lambda one: one.member)
    by_episode: dict[str, dict[str, float]] = {one.episode: {} for one in counting}
    for agent in (agent for agent in around.agents if agent.trainable):
        called = [one for one in counting if one.is_compared(agent.name, is_alone=len(around.agents) == 1)]
        values = around.comparison.of_members(called, agent, baselines.get(agent.name))
        for one, advantage in zip(called, values, strict=False):
            by_episode[one.episode][agent.name] = advantage
    return by_episode


def _candidates(record: EpisodeRecord, around: JobContext) -> dict[tuple[str, int], float]:
    """Return the advantages of an episode's candidates by agent and turn."""
    if record.split is Split.EVAL or record.fault is not None:
        return {}
    trained = {agent.name for agent in around.agents if agent.trainable}
    return {
        (choice.agent, turn): advantage
        for choice in record.choices
        if choice.agent in trained
        for turn, advantage in zip(choice.turns, around.comparison.of_candidates(record, choice), strict=False)
    }


def _longest(record: EpisodeRecord, agent: str) -> int:
    """Return the number of tokens in the longest of the agent's turns that train with the episode's reward."""
    return max((len(turn.output_ids) for turn in record.own_turns(agent)), default=0)
