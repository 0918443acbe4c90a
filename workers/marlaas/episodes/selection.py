"""Select episodes and add their context from the run's records: step, advantage, rewards of their group. Pure."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from marlaas.episodes.record import EpisodeRecord
from marlaas_api.messages import JobSpec, StepRecord
from marlaas_api.messages.job_spec import AgentSettings
from marlaas_api.names import Split, group_token
from marlaas_worker.rl.advantages import advantages, overlong_penalty
from marlaas_worker.rl.algorithms import ALGORITHMS

Advantages = Callable[[Sequence[EpisodeRecord], AgentSettings], Sequence[float]]
"""Function from the fault-free members [G >= 2] of a complete group, and an agent, to the agent's advantages [G]."""


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
    """

    job: str
    record: EpisodeRecord
    step: int | None = None
    group_rewards: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    advantages: Mapping[str, float] = field(default_factory=dict)


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
    """Context of a job's episodes. `advantages` is None if the algorithm needs more than one group to compute them."""

    job: str
    group_size: int
    steps: Sequence[StepRecord] = ()
    advantages: Advantages | None = None
    agents: Sequence[AgentSettings] = ()


def placed(records: Iterable[EpisodeRecord], around: JobContext) -> list[Played]:
    """Return every episode with its context, in the given order."""
    all_records = list(records)
    groups: dict[str, list[EpisodeRecord]] = defaultdict(list)
    for record in all_records:
        groups[record.group].append(record)
    step_of = {f"t{index}": step.step for step in around.steps for index in step.indices}
    own = {episode: advantage for group in groups.values() for episode, advantage in _advantages(group, around)}
    return [
        Played(
            around.job,
            record,
            step_of.get(group_token(record.group)),
            _rewards(groups[record.group]),
            own.get(record.episode, {}),
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


def _advantages(group: Sequence[EpisodeRecord], around: JobContext) -> Iterable[tuple[str, dict[str, float]]]:
    """Return each member's advantages by trained agent, once all members have ended. Held-out tasks have none."""
    if around.advantages is None or len(group) < around.group_size or group[0].split is Split.EVAL:
        return []
    counting = sorted((one for one in group if one.fault is None), key=lambda one: one.member)
    by_episode: dict[str, dict[str, float]] = {one.episode: {} for one in counting}
    for agent in (agent for agent in around.agents if agent.trainable):
        called = [one for one in counting if len(around.agents) == 1 or one.speaks(agent.name)]
        values = around.advantages(called, agent) if len(called) > 1 else []
        for one, advantage in zip(called, values, strict=False):
            by_episode[one.episode][agent.name] = advantage
    return by_episode.items()


def advantages_of(spec: JobSpec) -> Advantages | None:
    """Return the function from a group to its advantages; None if rewards are compared with others than the group's."""
    rule = ALGORITHMS[spec.training.algorithm]
    if rule.over != "group" or spec.training.has_running_baseline:
        return None
    max_tokens, asked = spec.rollout.max_tokens, spec.training.overlong.tokens
    overlong = int(rule.overlong * max_tokens) if asked is None else asked

    def of(members: Sequence[EpisodeRecord], agent: AgentSettings) -> list[float]:
        penalties = [overlong_penalty(_longest(one, agent.name), max_tokens, overlong) for one in members]
        rewards = [one.trained_reward(agent) + penalty for one, penalty in zip(members, penalties, strict=True)]
        return advantages(rule.advantage, rewards)

    return of


def _longest(record: EpisodeRecord, agent: str) -> int:
    """Return the number of tokens in the longest of the agent's turns that train with the episode's reward."""
    candidates = {turn for choice in record.choices if choice.agent == agent for turn in choice.turns}
    own = (turn for turn in record.turns if turn.agent == agent and turn.turn not in candidates)
    return max((len(turn.output_ids) for turn in own), default=0)
