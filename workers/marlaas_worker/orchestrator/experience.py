"""The experience store of a job: collects episodes into groups until every member has ended, then splits a group by agent.

FlexMARL (arXiv 2602.09578, section 4.2): one table per agent; the agents of a job share tasks and episodes, nothing else.
Invariant: the first record of a member counts; replays and duplicates do not change a group's result. Steps are handled in `steps`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from marlaas_api.messages import (
    Difficulty,
    Episode,
    GroupOutcome,
    GroupPlays,
    GroupResolution,
    TrajectoryRef,
    TurnReward,
)
from marlaas_api.messages.agent_settings import AgentSettings, own_weight, trained_reward
from marlaas_api.messages.training_settings import CreditSettings
from marlaas_api.names import group_token
from marlaas_worker.rl.advantages import has_signal, has_turn_signal, turn_returns

_TO_EPISODES = CreditSettings()
_FEWEST = 2
"""Fewest rewards that can be compared within a group."""
MAX_REPEATS = 4
"""Limit of the repeated plays that are kept for a group, in multiples of its size. The tokens of plays beyond it count as unrecorded."""


@dataclass(frozen=True, slots=True)
class AgentGroup:
    """One policy's part of a complete group.

    Several agents of a job may play one policy, which has the name of its own agent. A choice is a place in an episode where an agent has
    generated several replies, the candidates.

    Attributes:
        trajectories: if `outcome` is SIGNAL, those that train the policy: the trajectories of the trained agents that play it, then the
            candidates of these agents' choices, each as a trajectory of one turn. An agent or a choice whose rewards have no signal is left
            out, and so is a trajectory of candidates alone. With any other outcome, the trajectories of the policy's own agent. An agent
            has a trajectory for each member without a fault in which it has taken a turn; in a job of one agent, for each member without
            a fault.
        outcome: whether the group trains the policy, or why not.
        rewards: the rewards that train the policy's own agent (`trained_reward`), one for each member without a fault, even if the agent
            has taken no turn in it; empty if the task may not call the agent.
        other_rewards: as `rewards`, for each other agent that plays the policy, by the agent's name; also for agents that are not trained.
    """

    trajectories: tuple[TrajectoryRef, ...]
    outcome: GroupOutcome
    rewards: tuple[float, ...]
    other_rewards: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """A group whose members have all ended.

    Attributes:
        index: number of the group, unique in the job.
        name: name of the group, unique in the installation.
        agents: the part of each policy, by the name of its own agent, in the order of the manifest.
        faults: number of faults by class, including those of earlier attempts.
        episodes: one for each member, in member order.
        repeats: further plays of members that had ended already. Only their usage counts; their conversations are removed.
    """

    index: int
    name: str
    agents: Mapping[str, AgentGroup]
    faults: Counter[str]
    episodes: tuple[Episode, ...] = ()
    repeats: tuple[Episode, ...] = ()

    @property
    def plays(self) -> GroupPlays:
        """Summary of the members' episodes without a fault: digest of the prompt, generated tokens, replies, cut replies, longest duration (s)."""
        counted = [episode for episode in self.episodes if episode.fault is None]
        prompts = [episode.prompt for episode in counted if episode.prompt]
        return GroupPlays(
            prompt=next(iter(prompts), ""),
            is_mixed=len(set(prompts)) > 1,
            tokens=tuple(episode.num_tokens for episode in counted),
            num_turns=sum(episode.num_turns for episode in counted),
            num_cut=sum(episode.num_cut for episode in counted),
            num_overtime=sum(episode.num_overtime for episode in counted),
            seconds=max((episode.duration_s for episode in counted), default=0.0),
            data_digest=next((episode.data_digest for episode in counted if episode.data_digest), ""),
        )

    @property
    def has_signal(self) -> bool:
        """Whether the group can train any agent."""
        return any(part.outcome is GroupOutcome.SIGNAL for part in self.agents.values())


class Experience:
    """Collects the episodes of a job by group, until every member of a group has ended."""

    def __init__(
        self,
        agents: Sequence[AgentSettings],
        group_size: int,
        *,
        needs_no_others: bool = False,
        credit: CreditSettings = _TO_EPISODES,
        demonstrates: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Create an empty store for the groups of a job.

        Args:
            agents: all agents of the job.
            group_size: number of members of a group, except demonstrations.
            needs_no_others: rewards are not compared within a group, so one episode is enough, and every trajectory has signal.
            credit: whether rewards count by episode or by turn, which decides whether they have signal.
            demonstrates: returns whether a group, by name, is a demonstration: it has one member, whose reward is compared with nothing.
        """
        self._agents = tuple(agents)
        self._needs_no_others, self._demonstrates = needs_no_others, demonstrates
        self._group_size, self._credit = group_size, credit
        self._members: dict[str, dict[int, Episode]] = {}
        self._repeats: dict[str, dict[str, Episode]] = {}

    def add(self, episode: Episode) -> CompleteGroup | None:
        """Add an episode that has ended; return its group if that completes the group, else None."""
        members = self._members.setdefault(episode.group, {})
        if members.setdefault(episode.member, episode).episode != episode.episode:
            repeats = self._repeats.setdefault(episode.group, {})
            if len(repeats) < MAX_REPEATS * self._group_size:
                repeats[episode.episode] = episode.model_copy(update={"leaves": {}, "choices": (), "turn_rewards": {}})
        if len(members) < (1 if self._demonstrates(episode.group) else self._group_size):
            return None
        del self._members[episode.group]
        repeated = self._repeats.pop(episode.group, {})
        return self._complete([members[key] for key in sorted(members)], tuple(repeated.values()))

    def episodes(self) -> Iterator[Episode]:
        """Return the episodes of the groups that are not complete, one for each member that has ended."""
        return (episode for members in self._members.values() for episode in members.values())

    def ended(self, group: str) -> list[int]:
        """Return the numbers of the members that have ended, in ascending order, of a group that is not complete."""
        return sorted(self._members.get(group, ()))

    def faults(self) -> Counter[str]:
        """Return the number of faults by class in groups that are not complete yet."""
        return count_faults(self.episodes())

    def _complete(self, episodes: list[Episode], repeats: tuple[Episode, ...]) -> CompleteGroup:
        name = episodes[0].group
        needs_no_others = self._needs_no_others or self._demonstrates(name)
        policies = [agent for agent in self._agents if agent.policy is None]
        return CompleteGroup(
            index=group_index(name),
            name=name,
            agents={agent.name: self._part(agent, episodes, needs_no_others) for agent in policies},
            faults=count_faults(episodes),
            episodes=tuple(episodes),
            repeats=repeats,
        )

    def _part(self, agent: AgentSettings, episodes: Iterable[Episode], needs_no_others: bool) -> AgentGroup:
        """Return one policy's part of a complete group.

        Args:
            agent: the policy's own agent.
            episodes: of all members of the group.
            needs_no_others: as in the constructor; also True for a demonstration.
        """
        fewest = 1 if needs_no_others else _FEWEST
        counted = [episode for episode in episodes if episode.fault is None]
        players = [one for one in self._agents if one.policy_name == agent.name]
        is_alone = len(self._agents) == 1
        spoke = {one.name: [each for each in counted if is_alone or each.leaves.get(one.name)] for one in players}
        called = {one.name: tuple(_trajectory(one, episode) for episode in spoke[one.name]) for one in players}
        rewards = {
            one.name: tuple(trained_reward(one, each.rewards) for each in counted if each.may_call(one.name))
            for one in players
        }
        trained = [one for one in players if one.trainable]
        own_turns = [tuple(_trajectory(one, e) for e in spoke[one.name] if _has_own_turn(one, e)) for one in trained]
        played = [own for own in own_turns if len(own) >= fewest]
        chosen = [candidates for one in trained for episode in counted for candidates in _candidates(one, episode)]
        compared = played + [candidates for candidates in chosen if len(candidates) >= _FEWEST]
        varied = [one for one in compared if (needs_no_others and one in played) or self._has_signal(one)]
        if len(counted) < fewest:
            outcome = GroupOutcome.FAULTED
        elif not agent.trainable:
            outcome = GroupOutcome.FROZEN
        elif not compared:
            outcome = GroupOutcome.UNCALLED
        else:
            outcome = GroupOutcome.SIGNAL if varied else GroupOutcome.FLAT
        used = varied if outcome is GroupOutcome.SIGNAL else [called[agent.name]]
        return AgentGroup(
            tuple(trajectory for together in used for trajectory in together),
            outcome,
            rewards.pop(agent.name),
            rewards,
        )

    def _has_signal(self, compared: Sequence[TrajectoryRef]) -> bool:
        if has_signal([one.reward for one in compared]):
            return True
        if self._credit.type == "episode":
            return False
        rewards = [[turn.reward for turn in one.turn_rewards] for one in compared]
        returns = [
            turn_returns(own, one.reward, self._credit.discount) for own, one in zip(rewards, compared, strict=True)
        ]
        return has_turn_signal(returns, by_state=self._credit.type == "state")


def _has_own_turn(agent: AgentSettings, episode: Episode) -> bool:
    """Return whether an agent has taken a turn that is not a candidate of one of its choices; also True if it has no choices."""
    choices = [one for one in episode.choices if one.agent == agent.name]
    candidates = {turn for one in choices for turn in one.turns}
    after = (one.parent is not None and one.parent not in candidates for one in choices)
    return not choices or any(after) or not candidates.issuperset(episode.leaves.get(agent.name, ()))


def _trajectory(agent: AgentSettings, episode: Episode) -> TrajectoryRef:
    untrained = tuple(turn for one in episode.choices if one.agent == agent.name for turn in one.turns)
    return TrajectoryRef(
        member=episode.member,
        episode=episode.episode,
        leaves=episode.leaves.get(agent.name, ()),
        reward=trained_reward(agent, episode.rewards),
        ending=episode.ending,
        agent="" if agent.policy is None else agent.name,
        untrained=untrained,
        turn_rewards=_turn_rewards(agent, episode),
    )


def _turn_rewards(agent: AgentSettings, episode: Episode) -> tuple[TurnReward, ...]:
    """Return the rewards of an agent's turns, times the weight of the agent's own reward in the reward that trains it."""
    own, weight = episode.turn_rewards.get(agent.name, ()), own_weight(agent)
    return own if weight == 1.0 else tuple(TurnReward(turn=one.turn, reward=weight * one.reward) for one in own)


def _candidates(agent: AgentSettings, episode: Episode) -> list[tuple[TrajectoryRef, ...]]:
    """Return, for each of an agent's choices in an episode, the candidates as trajectories of one turn; empty for a choice without rewards."""
    return [
        tuple(
            TrajectoryRef(
                member=episode.member,
                episode=episode.episode,
                leaves=(turn,),
                reward=reward,
                agent="" if agent.policy is None else agent.name,
                choice=number,
            )
            for turn, reward in zip(choice.turns, choice.rewards, strict=False)
        )
        for number, choice in enumerate(episode.choices)
        if choice.agent == agent.name
    ]


def group_index(group: str) -> int:
    """Return the index of a training group. group: its name."""
    return int(group_token(group)[1:])


def difficulty(parts: Iterable[GroupResolution | AgentGroup], solved_reward: float) -> Difficulty | None:
    """Return the difficulty of a group's task; None if too many of its members ended with a fault, or no trained agent was called.

    The task is VARIED if its group has signal for any policy. Otherwise it is SOLVED or HOPELESS.

    Args:
        parts: the parts of one group, one for each policy.
        solved_reward: a task without signal is SOLVED if no reward in the parts with the outcome FLAT is below this.
    """
    found = list(parts)
    outcomes = {part.outcome for part in found}
    flat = [
        reward
        for part in found
        if part.outcome is GroupOutcome.FLAT
        for own in (part.rewards, *part.other_rewards.values())
        for reward in own
    ]
    if GroupOutcome.FAULTED in outcomes:
        return None
    if GroupOutcome.SIGNAL in outcomes:
        return Difficulty.VARIED
    if not flat:
        return None
    return Difficulty.SOLVED if min(flat) >= solved_reward else Difficulty.HOPELESS


def count_faults(episodes: Iterable[Episode]) -> Counter[str]:
    """Return the number of faults by class, including those of earlier attempts."""
    episodes = list(episodes)
    faults = Counter(fault.value for episode in episodes for fault in episode.prior_faults)
    faults.update(episode.fault.value for episode in episodes if episode.fault is not None)
    return faults
