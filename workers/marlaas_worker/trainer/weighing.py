"""Computes advantages from trajectories and their rewards, and cuts trajectories into segments and rows. Pure."""

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from marlaas_api.messages import Turn
from marlaas_api.messages.training_settings import BaselineSettings, CreditSettings, TrainingSettings
from marlaas_api.wire import unpack_ids, unpack_logprobs
from marlaas_worker.rl.advantages import Estimator, advantages, by_state, by_turn, overlong_penalty, turn_returns
from marlaas_worker.rl.algorithms import ALGORITHMS
from marlaas_worker.trainer.batching import Row, Segment, pack, pack_prefix_tree
from marlaas_worker.trainer.trajectories import Trajectory

_METRIC = "baseline"


Advantage = float | Mapping[int, float] | Mapping[int, npt.NDArray[np.float32]]
"""Advantage of a trajectory in one of three forms.

- A number: for all generated tokens.
- Numbers by turn number: for all generated tokens of the turn.
- Arrays by turn number: for each of the turn's T generated tokens [T]; a token with NaN is not trained.
"""


class Baselines:
    """Running means of rewards, one for each agent that plays a policy (role-conditioned advantage estimation: SPIRAL, arXiv 2506.24119).

    After a step with mean reward m, the baseline b becomes decay * b + (1 - decay) * m; the first step sets it to m, and has a baseline of 0
    itself. Deltas to the paper: b changes between steps only, so that a step does not depend on the order of its groups; and
    it begins at the first mean, not at 0. The values are metrics of the version that the step makes, from which a
    restart takes them.

    A job that compares rewards within groups has no baselines.

    Attributes:
        values: baseline by agent; empty name: the agent of the policy itself (`TrajectoryRef.agent`).
    """

    def __init__(self, settings: BaselineSettings) -> None:
        self._decay = settings.decay
        self._is_used = settings.type == "running-mean"
        self.values: dict[str, float] = {}
        self._step: dict[str, list[float]] = {}
        """Rewards of the step so far, by agent."""

    def restore(self, metrics: Mapping[str, float]) -> None:
        """Set the values from a version's metrics, and drop the rewards of the open step."""
        self.values = {
            name.removeprefix(_METRIC).removeprefix("_"): value
            for name, value in metrics.items()
            if self._is_used and name.startswith(_METRIC)
        }
        self._step = {}

    def add(self, rewards: Mapping[Hashable, Sequence[float]]) -> None:
        """Add the rewards of a group, as returned by `Weighing.rewards`, to those of the open step. Rewards of candidates are ignored."""
        for agent, own in rewards.items():
            if self._is_used and isinstance(agent, str):
                self._step.setdefault(agent, []).extend(own)

    def rewind(self) -> None:
        """Drop the rewards of the open step, which restarts at its first group."""
        self._step = {}

    def finish_step(self) -> dict[str, float]:
        """Update the values with the rewards of the step, and return the values as metrics: `baseline`, or `baseline_AGENT`."""
        if not self._is_used:
            return {}
        for agent, rewards in self._step.items():
            mean = math.fsum(rewards) / len(rewards)
            self.values[agent] = self._decay * self.values.get(agent, mean) + (1 - self._decay) * mean
        self._step = {}
        return {f"{_METRIC}_{agent}" if agent else _METRIC: value for agent, value in self.values.items()}


@dataclass(frozen=True, slots=True)
class Weighing:
    """A job's conversion of rewards to advantages."""

    estimator: Estimator | Literal["teacher"]
    """Estimator that turns compared rewards into advantages; teacher: each token has an advantage from a teacher's logprob instead."""
    max_tokens: int
    """Most generated tokens of a turn."""
    overlong_tokens: int
    """Number of the last tokens up to max_tokens, over which the overlong penalty grows; 0: no penalty."""
    filter_overlong: bool = False
    """Leave truncated trajectories out of the loss (DAPO, arXiv 2503.14476, section 3.4).

    Their rewards are still compared, as in TRL (`mask_truncated_completions`) and NeMo RL (`overlong_filtering`): the filter
    removes only their own gradient, which would penalise the truncated text.
    """
    has_baseline: bool = False
    """Whether an episode's reward is compared with the agent's running mean. Candidates are compared within their choice in any case."""
    credit: CreditSettings = field(default_factory=CreditSettings)
    """How the turns of an episode get advantages; a candidate is a single turn."""

    def reward(self, member: Trajectory) -> float:
        """Return a trajectory's reward plus the (negative) penalty for overlong turns."""
        return member.reward + overlong_penalty(member.longest_turn, self.max_tokens, self.overlong_tokens)

    def rewards(self, members: Iterable[Trajectory]) -> dict[Hashable, list[float]]:
        """Return the rewards with penalties, by `Trajectory.compared_with`: those of one key are compared with each other."""
        return {key: [self.reward(member) for member in own] for key, own in _together(members).items()}

    def segments(
        self, groups: Sequence[Sequence[Trajectory]], baselines: Mapping[str, float] | None = None
    ) -> list[list[Segment]]:
        """Return the segments of each group, member by member, with advantages.

        Rewards are compared among trajectories with the same `compared_with`.

        Args:
            groups: one group, or all groups of a step if the rewards of a step are compared.
            baselines: `Baselines.values`, used if `has_baseline`; an agent without a value has 0.
        """
        together = _together(member for group in groups for member in group)
        values = {key: iter(self._advantages(key, own, baselines or {})) for key, own in together.items()}
        weighed = [[(member, next(values[member.compared_with])) for member in group] for group in groups]
        return [
            [
                part
                for number, (member, value) in enumerate(group)
                if self.trains(member)
                for part in segments_of(member.turns, member.leaves, value, number, member.untrained)
            ]
            for group in weighed
        ]

    def _advantages(
        self, key: Hashable, members: Sequence[Trajectory], baselines: Mapping[str, float]
    ) -> Sequence["Advantage"]:
        """Return the advantage of each trajectory, in the order of `members`, from a comparison of their rewards or from a teacher.

        It is by turn number (see `Advantage`) if the job credits turns or has a teacher; else one number for the trajectory.

        Args:
            key: `Trajectory.compared_with` of all members: an agent's name, or for candidates a tuple that identifies their choice.
            baselines: by agent, the value to subtract from rewards if `has_baseline`; 0 if absent. Candidates have none.
        """
        rewards, estimator = [self.reward(member) for member in members], self.estimator
        is_episode = isinstance(key, str)
        if estimator == "teacher":
            return [member.teacher_advantages for member in members]
        if self.has_baseline and is_episode:
            return [reward - baselines.get(str(key), 0.0) for reward in rewards]
        if self.credit.type == "episode" or self.estimator == "none" or not is_episode:
            return advantages(estimator, rewards)
        return self._by_turn(estimator, members, rewards)

    def _by_turn(
        self, estimator: Estimator, members: Sequence[Trajectory], rewards: Sequence[float]
    ) -> list[dict[int, float]]:
        """Return the advantages of trajectories by turn. rewards: of the trajectories."""
        turns = [member.own_turns for member in members]
        returns = [
            turn_returns([member.turn_rewards.get(turn, 0.0) for turn in own], reward, self.credit.discount)
            for member, own, reward in zip(members, turns, rewards, strict=True)
        ]
        if self.credit.type == "turn":
            found = by_turn(estimator, returns)
        else:
            # What the environment has shown right before a turn: the tokens that were appended for it, and for a turn that
            # opens a segment those of its whole context.
            states = [
                [member.turns[turn].prompt_ids for turn in own] for member, own in zip(members, turns, strict=True)
            ]
            whole = advantages(estimator, rewards)
            parts = by_state(estimator, returns, states)
            found = [[one + self.credit.weight * part for part in own] for one, own in zip(whole, parts, strict=True)]
        return [dict(zip(own, values, strict=True)) for own, values in zip(turns, found, strict=True)]

    def trains(self, member: Trajectory) -> bool:
        """Return whether a trajectory is part of the loss."""
        return not (self.filter_overlong and member.is_truncated)


def _together(members: Iterable[Trajectory]) -> dict[Hashable, list[Trajectory]]:
    """Return the trajectories whose rewards are compared with each other, by `Trajectory.compared_with`."""
    found: dict[Hashable, list[Trajectory]] = {}
    for member in members:
        found.setdefault(member.compared_with, []).append(member)
    return found


def weighing(training: TrainingSettings, max_tokens: int) -> Weighing:
    """Return the conversion of rewards to advantages for these settings. max_tokens: most generated tokens of a turn."""
    rule, overlong = ALGORITHMS[training.algorithm], training.overlong
    has_baseline = training.has_running_baseline
    return Weighing(rule.advantage, max_tokens, overlong.tokens, overlong.filter, has_baseline, training.credit)


def segments_of(
    turns: Mapping[int, Turn],
    leaves: Sequence[int],
    advantage: Advantage,
    trajectory: int = 0,
    untrained: Collection[int] = (),
) -> list[Segment]:
    """Cut a trajectory into segments, so that every generated token is trained once.

    Each path runs from a leaf, or from the parent of a turn that opens a new segment, back to the turn that opens the path's
    own segment. A path within another one gives no segment of its own.
    A turn on several paths is trained on the first path and is context on the others. A prompt that did not fit the context
    window was never run: its segment has no tokens and is dropped.

    Args:
        turns: the trajectory's turns, by turn number.
        leaves: the last turn of each conversation.
        advantage: the trajectory's; a turn that a mapping lacks has 0.
        trajectory: number of the trajectory within its group.
        untrained: turns that are context on all paths.
    """
    left = {turn.parent for turn in turns.values() if turn.opens_segment and turn.parent is not None}
    paths = {leaf: _path_to(turns, leaf) for leaf in sorted({*leaves, *left})}
    inner = {turn.turn for path in paths.values() for turn in path[:-1]}
    trained: set[int] = set(untrained)
    segments = []
    for leaf, path in paths.items():
        if leaf not in inner:
            segments.append(_segment(path, trained, advantage))
            trained |= {turn.turn for turn in path}
    tokens = sum(int(segment.generated.sum()) for segment in segments)
    whole = (replace(segment, trajectory=trajectory, trajectory_tokens=tokens) for segment in segments)
    return (
        [segment for segment in whole if segment.generated.any()] if untrained else [one for one in whole if len(one)]
    )


def _path_to(turns: Mapping[int, Turn], leaf: int) -> list[Turn]:
    """Return the turns of one context, from the turn that opens the segment to `leaf`."""
    path = [turns[leaf]]
    while not path[-1].opens_segment and path[-1].parent is not None:
        path.append(turns[path[-1].parent])
    return path[::-1]


def _segment(path: Sequence[Turn], trained: set[int], advantage: Advantage) -> Segment:
    ids, generated, behaviour, weights = [], [], [], []
    for turn in path:
        prompt, output = unpack_ids(turn.prompt_ids), unpack_ids(turn.output_ids)
        ids += [prompt, output]
        own = advantage if isinstance(advantage, float) else advantage.get(turn.turn, 0.0)
        weight_of_output = np.broadcast_to(np.asarray(own, np.float32), len(output))
        weights += [np.zeros(len(prompt), np.float32), weight_of_output]
        generated += [np.zeros(len(prompt), np.bool_), ~np.isnan(weight_of_output) & (turn.turn not in trained)]
        sampled = np.zeros(len(output), np.float32) if turn.demonstration else unpack_logprobs(turn.logprobs)
        behaviour += [np.zeros(len(prompt), np.float32), sampled]
    mask = np.concatenate(generated)
    logprobs = np.where(mask, np.concatenate(behaviour), np.float32(0))
    weight = advantage if isinstance(advantage, float) else np.concatenate(weights)
    return Segment(np.concatenate(ids), mask, logprobs, path[-1].version, weight)


def rows_of_groups(
    weighing: Weighing,
    groups: Sequence[Sequence[Trajectory]],
    pairs_per_token: int,
    budget: int,
    baselines: Mapping[str, float] | None = None,
) -> list[list[Row]]:
    """Return the rows of each group, with advantages.

    Args:
        groups, baselines: see `Weighing.segments`.
        pairs_per_token: see `BaseModel`.
        budget: most tokens of a row that holds several segments.
    """
    return [pack_prefix_tree(one, pairs_per_token, budget) for one in weighing.segments(groups, baselines)]


def batches_of_group(group: Sequence[Trajectory], pairs_per_token: int, budget: int) -> list[list[Row]]:
    """Pack one group into micro-batches of its own, for a measurement: all advantages are zero.

    `Row.trajectories` is the index of a token's trajectory in the group.

    Args:
        pairs_per_token: see `BaseModel`.
        budget: most padded tokens of a micro-batch of several rows.
    """
    parts = [
        segments_of(member.turns, member.leaves, 0.0, number, member.untrained) for number, member in enumerate(group)
    ]
    rows = pack_prefix_tree([part for each in parts for part in each], pairs_per_token, budget)
    full, rest = pack([], rows, budget)
    return [*full, rest] if rest else full
