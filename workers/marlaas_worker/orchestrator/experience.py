"""The experience store of one agent: collects episodes into groups until every member has ended.

Invariant: the first record of a member counts; replays and duplicates change nothing. Steps are handled in
`steps`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from marlaas_api.messages import Difficulty, Episode, GroupOutcome, TrajectoryRef
from marlaas_api.names import group_token
from marlaas_worker.rl.advantages import has_signal


@dataclass(frozen=True, slots=True)
class CompleteGroup:
    """A group whose members have all ended; trajectories in member order, without faulted members.

    Attributes:
        index: index of the group, unique in the job.
        episodes: one for each member, in member order.
        repeats: further plays of members, which do not count.
    """

    index: int
    name: str
    trajectories: tuple[TrajectoryRef, ...]
    outcome: GroupOutcome
    faults: Counter[str]
    episodes: tuple[Episode, ...] = ()
    repeats: tuple[Episode, ...] = ()

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the members without a fault."""
        return tuple(trajectory.reward for trajectory in self.trajectories)


class Experience:
    """Episodes of groups that are not complete yet."""

    def __init__(self, agent: str, group_size: int) -> None:
        self._agent = agent
        self._group_size = group_size
        self._members: dict[str, dict[int, Episode]] = {}
        self._repeats: dict[str, dict[str, Episode]] = {}

    def add(self, episode: Episode) -> CompleteGroup | None:
        """Add an episode; return its group if that is complete now, else None."""
        members = self._members.setdefault(episode.group, {})
        if members.setdefault(episode.member, episode).episode != episode.episode:
            self._repeats.setdefault(episode.group, {})[episode.episode] = episode
        if len(members) < self._group_size:
            return None
        del self._members[episode.group]
        repeats = self._repeats.pop(episode.group, {})
        return self._complete([members[key] for key in sorted(members)], tuple(repeats.values()))

    def faults(self) -> Counter[str]:
        """Return the number of faults by class in groups that are not complete yet."""
        return count_faults([episode for members in self._members.values() for episode in members.values()])

    def _complete(self, episodes: list[Episode], repeats: tuple[Episode, ...]) -> CompleteGroup:
        trajectories = tuple(self._trajectory(episode) for episode in episodes if episode.fault is None)
        return CompleteGroup(
            index=group_index(episodes[0].group),
            name=episodes[0].group,
            trajectories=trajectories,
            outcome=_outcome([trajectory.reward for trajectory in trajectories]),
            faults=count_faults(episodes),
            episodes=tuple(episodes),
            repeats=repeats,
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


def difficulty(outcome: GroupOutcome, rewards: Sequence[float], solved_reward: float) -> Difficulty | None:
    """Return the difficulty of a group's task; None if too many of its members ended with a fault."""
    if outcome is GroupOutcome.FAULTED:
        return None
    if outcome is GroupOutcome.SIGNAL:
        return Difficulty.VARIED
    return Difficulty.SOLVED if rewards[0] >= solved_reward else Difficulty.HOPELESS


def _outcome(rewards: list[float]) -> GroupOutcome:
    if len(rewards) < 2:
        return GroupOutcome.FAULTED
    return GroupOutcome.SIGNAL if has_signal(rewards) else GroupOutcome.FLAT


def count_faults(episodes: Iterable[Episode]) -> Counter[str]:
    """Return the number of faults by class, including those of earlier attempts."""
    episodes = list(episodes)
    faults = Counter(fault.value for episode in episodes for fault in episode.prior_faults)
    faults.update(episode.fault.value for episode in episodes if episode.fault is not None)
    return faults
