"""The experience store of one agent: episodes meet by group and member, and a group is complete when every member has ended.

Invariant: the first record of a member is the member; replays and duplicates change nothing. Knows nothing of steps.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from marlaas_api.messages import Difficulty, Episode, TrajectoryRef
from marlaas_api.names import group_token
from marlaas_worker.rl.advantages import has_signal


class GroupOutcome(StrEnum):
    """What a complete group is good for. FLAT: every member earned the same, so no advantage; FAULTED: fewer than two members count."""

    SIGNAL = "signal"
    FLAT = "flat"
    FAULTED = "faulted"


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """A group whose members have all ended; trajectories in member order, faulted members left out.

    index: the group's own, which no other group has; task: index of the task that was played, which may come again.
    """

    index: int
    task: int
    name: str
    trajectories: tuple[TrajectoryRef, ...]
    verdict: GroupOutcome
    faults: Counter[str]

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the members that count."""
        return tuple(trajectory.reward for trajectory in self.trajectories)

    def difficulty(self, solved_reward: float) -> Difficulty | None:
        """How hard the task was; None if faults left nothing to say."""
        if self.verdict is GroupOutcome.FAULTED:
            return None
        if self.verdict is GroupOutcome.SIGNAL:
            return Difficulty.VARIED
        return Difficulty.SOLVED if self.rewards[0] >= solved_reward else Difficulty.HOPELESS


class Experience:
    """Episodes of groups that are not complete yet."""

    def __init__(self, agent: str, group_size: int) -> None:
        self._agent = agent
        self._group_size = group_size
        self._members: dict[str, dict[int, Episode]] = {}

    def add(self, episode: Episode) -> CompleteGroup | None:
        """Note an episode; return its group if this was the last member."""
        members = self._members.setdefault(episode.group, {})
        members.setdefault(episode.member, episode)
        if len(members) < self._group_size:
            return None
        del self._members[episode.group]
        return self._complete([members[key] for key in sorted(members)])

    def faults(self) -> Counter[str]:
        """Faults by class in groups that are not complete yet."""
        return count_faults([episode for members in self._members.values() for episode in members.values()])

    def _complete(self, episodes: list[Episode]) -> CompleteGroup:
        trajectories = tuple(self._trajectory(episode) for episode in episodes if episode.fault is None)
        return CompleteGroup(
            index=group_index(episodes[0].group),
            task=episodes[0].index,
            name=episodes[0].group,
            trajectories=trajectories,
            verdict=_verdict([trajectory.reward for trajectory in trajectories]),
            faults=count_faults(episodes),
        )

    def _trajectory(self, episode: Episode) -> TrajectoryRef:
        return TrajectoryRef(
            member=episode.member,
            episode=episode.episode,
            leaves=episode.leaves.get(self._agent, ()),
            reward=episode.rewards[self._agent],
            ending=episode.ending,
        )


def group_index(group: str) -> int:
    """Index of a training group, from its name."""
    return int(group_token(group)[1:])


def _verdict(rewards: list[float]) -> GroupOutcome:
    if len(rewards) < 2:
        return GroupOutcome.FAULTED
    return GroupOutcome.SIGNAL if has_signal(rewards) else GroupOutcome.FLAT


def count_faults(episodes: Iterable[Episode]) -> Counter[str]:
    """Faults by class, those of earlier attempts included."""
    episodes = list(episodes)
    faults = Counter(fault.value for episode in episodes for fault in episode.prior_faults)
    faults.update(episode.fault.value for episode in episodes if episode.fault is not None)
    return faults
