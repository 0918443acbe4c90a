"""A group's turns, fetched and checked, as segments: what the engine's side recorded and nothing else is trained.

Every generated token is trained exactly once, also where conversations branch. What does not fit together is a broken invariant and
raises `TrajectoryInvalid`: never is a turn skipped, and never is a token trained that another policy sampled.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from marlaas_api import subjects, wire
from marlaas_api.arrays import unpack_ids, unpack_logprobs
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.messages import Ending, GroupReady, StopReason, TrajectoryRef, Turn
from marlaas_worker.rl.advantages import Estimator, advantages, overlong_penalty
from marlaas_worker.trainer.rows import Segment

MAX_CONCURRENT_READS = 32
ROUNDING = 1e-4
"""How far above zero rounding may put an engine's logprob."""

T = TypeVar("T")


class TrajectoryInvalid(Permanent):
    """Recorded turns contradict each other, their group or their job."""


class TurnMissing(Retryable):
    """A turn that an episode names is not on the stream (yet)."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the job says of every turn. adapters: sha256 of the adapter file by version, as far as the trainer knows it."""

    temperature: float
    vocab_size: int
    adapters: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent's turns in one episode, by number, the last of each conversation, the environment's reward, and how the episode ended."""

    turns: Mapping[int, Turn]
    leaves: tuple[int, ...]
    reward: float
    ending: Ending = Ending.COMPLETED

    @property
    def longest_turn(self) -> int:
        """Most tokens generated in one turn."""
        return max((len(unpack_ids(turn.output_ids)) for turn in self.turns.values()), default=0)

    @property
    def is_truncated(self) -> bool:
        """Whether maxTurns ended the episode, or maxTokens or the context window a last turn."""
        cut = (self.turns[leaf].stop_reason in (StopReason.LENGTH, StopReason.CONTEXT) for leaf in self.leaves)
        return self.ending is Ending.MAX_TURNS or any(cut)


@dataclass(frozen=True, slots=True)
class Weighing:
    """How a job's rewards become advantages. overlong_tokens: the last of max_tokens over which a reward falls.

    filter_overlong: leave truncated trajectories out of the loss (DAPO, arXiv 2503.14476, section 3.4). Their rewards are compared like any other, as in
    TRL (`mask_truncated_completions`) and NeMo RL (`overlong_filtering`): the filter is about their own gradient, which would punish what was cut off.
    """

    estimator: Estimator
    max_tokens: int
    overlong_tokens: int
    filter_overlong: bool = False

    def segments(self, groups: Sequence[Sequence[Trajectory]]) -> list[list[Segment]]:
        """Segments of each group, member by member, where rewards are compared across all trajectories given."""
        rewards = [
            member.reward + overlong_penalty(member.longest_turn, self.max_tokens, self.overlong_tokens)
            for group in groups
            for member in group
        ]
        values = iter(advantages(self.estimator, rewards))
        weighed = [[(member, next(values)) for member in group] for group in groups]
        return [
            [
                part
                for number, (member, value) in enumerate(group)
                if self.trains(member)
                for part in segments_of(member.turns, member.leaves, value, number)
            ]
            for group in weighed
        ]

    def trains(self, member: Trajectory) -> bool:
        """Whether a trajectory is part of the loss."""
        return not (self.filter_overlong and member.is_truncated)


async def read_group(bus: Bus, blobs: Blobs, group: GroupReady, expected: Expectation) -> list[Trajectory]:
    """Fetch a group's turns, member by member.

    Raises:
        TrajectoryInvalid: something recorded is not what it must be.
        TurnMissing: a turn is not there.
    """
    reader = _TurnReader(bus, blobs, group)
    members = await _all(reader.trajectory(ref) for ref in group.trajectories)
    for ref, turns in zip(group.trajectories, members, strict=True):
        for turn in turns.values():
            check_turn(turn, group, ref, expected)
    return [
        Trajectory(turns, ref.leaves, ref.reward, ref.ending)
        for ref, turns in zip(group.trajectories, members, strict=True)
    ]


def segments_of(
    turns: Mapping[int, Turn], leaves: Sequence[int], advantage: float, trajectory: int = 0
) -> list[Segment]:
    """Cut a trajectory into segments: one per way from a leaf, or from where a segment was left, back to where its segment opens.

    A turn on several ways is trained on the first of them and context on the others. A prompt that did not fit the context window was
    never fed: it opened a segment of no tokens, of which nothing is left here.
    """
    left = {turn.parent for turn in turns.values() if turn.opens_segment and turn.parent is not None}
    ways = {leaf: _way(turns, leaf) for leaf in sorted({*leaves, *left})}
    inner = {turn.turn for path in ways.values() for turn in path[:-1]}
    trained: set[int] = set()
    segments = []
    for leaf, path in ways.items():
        if leaf not in inner:
            segments.append(_segment(path, trained, advantage))
            trained |= {turn.turn for turn in path}
    tokens = sum(int(segment.generated.sum()) for segment in segments)
    whole = (replace(segment, trajectory=trajectory, trajectory_tokens=tokens) for segment in segments)
    return [segment for segment in whole if len(segment)]


def check_turn(turn: Turn, group: GroupReady, ref: TrajectoryRef, expected: Expectation) -> None:
    """Raise TrajectoryInvalid unless a turn is what its group and its job say, sampled by the policy that the group is pinned to."""
    wanted: dict[str, object] = {
        "namespace": group.namespace,
        "job": group.job,
        "uid": group.uid,
        "agent": group.agent,
        "group": group.group,
    }
    wanted |= {
        "member": ref.member,
        "episode": ref.episode,
        "version": group.version,
        "temperature": expected.temperature,
    }
    if group.version in expected.adapters:
        wanted["adapter_sha256"] = expected.adapters[group.version]
    for name, value in wanted.items():
        if getattr(turn, name) != value:
            raise _invalid(turn, f"{name} is {getattr(turn, name)!r}, and the group says {value!r}")
    if turn.parent is None and not turn.opens_segment:
        raise _invalid(turn, "it has no parent and opens no segment")
    if turn.parent is not None and turn.parent >= turn.turn:
        raise _invalid(turn, f"its parent {turn.parent} does not come before it")
    _check_tokens(turn, expected.vocab_size)


def _check_tokens(turn: Turn, vocab_size: int) -> None:
    if any(len(data) % 4 for data in (turn.prompt_ids, turn.output_ids, turn.logprobs)):
        raise _invalid(turn, "ids and logprobs are not arrays of four-byte values")
    logprobs = unpack_logprobs(turn.logprobs)
    prompt, output = unpack_ids(turn.prompt_ids), unpack_ids(turn.output_ids)
    if len(output) != len(logprobs):
        raise _invalid(turn, f"{len(output)} generated tokens with {len(logprobs)} logprobs")
    if turn.opens_segment and len(output) and not len(prompt):
        raise _invalid(turn, "it opens a segment without a prompt")
    if not np.isfinite(logprobs).all() or (logprobs > ROUNDING).any():
        raise _invalid(turn, "a logprob is above zero or not finite")
    ids = np.concatenate([prompt, output])
    if ((ids < 0) | (ids >= vocab_size)).any():
        raise _invalid(turn, f"a token id is outside the vocabulary of {vocab_size}")


def _way(turns: Mapping[int, Turn], leaf: int) -> list[Turn]:
    """The turns of one context, from the one that opens the segment to the tip."""
    path = [turns[leaf]]
    while not path[-1].opens_segment and path[-1].parent is not None:
        path.append(turns[path[-1].parent])
    return path[::-1]


def _segment(path: Sequence[Turn], trained: set[int], advantage: float) -> Segment:
    ids, generated, behaviour = [], [], []
    for turn in path:
        prompt, output = unpack_ids(turn.prompt_ids), unpack_ids(turn.output_ids)
        ids += [prompt, output]
        generated += [np.zeros(len(prompt), np.bool_), np.full(len(output), turn.turn not in trained)]
        behaviour += [np.zeros(len(prompt), np.float32), unpack_logprobs(turn.logprobs)]
    mask = np.concatenate(generated)
    logprobs = np.where(mask, np.concatenate(behaviour), np.float32(0))
    return Segment(np.concatenate(ids), mask, logprobs, path[-1].version, advantage)


class _TurnReader:
    """Reads one group's turns, a bounded number at a time."""

    def __init__(self, bus: Bus, blobs: Blobs, group: GroupReady) -> None:
        self._bus, self._blobs, self._group = bus, blobs, group
        self._gate = asyncio.Semaphore(MAX_CONCURRENT_READS)

    async def trajectory(self, ref: TrajectoryRef) -> dict[int, Turn]:
        """All turns on the way from a trajectory's leaves to its beginnings, by number."""
        turns: dict[int, Turn] = {}
        wanted = set(ref.leaves)
        while wanted:
            found = await _all(self._turn(ref.episode, number) for number in sorted(wanted))
            turns |= {turn.turn: turn for turn in found}
            wanted = {turn.parent for turn in found if turn.parent is not None} - turns.keys()
        return turns

    async def _turn(self, episode: str, number: int) -> Turn:
        subject = subjects.turn(self._group.namespace, self._group.job, episode, number)
        async with self._gate:
            stored = await self._bus.last(subjects.TURNS, subject)
            if stored is None:
                raise TurnMissing(f"turn {subject} is not recorded")
            message = await wire.unpack(stored.data, self._blobs)
        if not isinstance(message, Turn) or message.turn != number:
            raise TrajectoryInvalid(f"{subject} holds something other than this turn: {type(message).__name__}")
        return message


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all coroutines; the first error itself, not a group of errors."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(part) for part in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in started]


def _invalid(turn: Turn, text: str) -> TrajectoryInvalid:
    where = subjects.turn(turn.namespace, turn.job, turn.episode, turn.turn)
    return TrajectoryInvalid(f"turn {where}, recorded by {turn.replica}: {text}")
