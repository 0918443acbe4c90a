"""Reads a group's turns, and checks that they fit the group and its job. `weighing` cuts them into segments.

Inconsistent turns break an invariant and raise `TrajectoryInvalid`: no turn is skipped, and no token that another policy
sampled is trained.
"""

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from marlaas_api import subjects, wire
from marlaas_api.background import await_all
from marlaas_api.blobs import Blobs
from marlaas_api.bus import Bus
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.messages import Ending, GroupReady, StopReason, TrajectoryRef, Turn
from marlaas_api.names import SCORES, is_measured
from marlaas_api.wire import unpack_ids, unpack_logprobs

MAX_CONCURRENT_READS = 32
ROUNDING = 1e-4
"""Largest positive logprob that is accepted as rounding of an engine."""


class TrajectoryInvalid(Permanent):
    """Recorded turns contradict each other, their group or their job."""


class TurnMissing(Retryable):
    """A turn that an episode refers to is not on the stream (yet)."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Values that every turn of a group must have.

    Attributes:
        temperature: the sampling temperature of the job.
        vocab_size: all token ids are below it.
        adapters: sha256 of the adapter file by version, for the versions that the trainer knows.
        refreshes: whether turns may be newer than their group's version (`rollout.refresh: turn`).
        is_demonstrated: whether the replies are given (demonstrations), so that no policy has sampled them.
        teacher: name of the agent that has scored the generated tokens; None: no agent has.
    """

    temperature: float
    vocab_size: int
    adapters: Mapping[int, str]
    refreshes: bool = False
    is_demonstrated: bool = False
    teacher: str | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent's part of an episode."""

    turns: Mapping[int, Turn]
    """By turn number."""
    leaves: tuple[int, ...]
    """The last turn of each conversation."""
    reward: float
    """From the environment."""
    ending: Ending = Ending.COMPLETED
    """How the episode ended."""
    compared_with: Hashable = ""
    """Rewards are compared among trajectories that have equal values here.

    It is the agent's name (empty: the agent of the policy itself), or for a candidate the tuple of agent, episode and choice.
    """
    untrained: frozenset[int] = frozenset()
    """Numbers of the turns that are context only."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards by turn number, which are part of `reward`."""
    teacher: Mapping[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    """By turn number, the teacher's logprobs of the generated tokens; NaN where it has none."""

    @property
    def teacher_advantages(self) -> dict[int, npt.NDArray[np.float32]]:
        """By turn number, log(teacher / mu) of each generated token, where mu is the policy that sampled it."""
        return {number: found - unpack_logprobs(self.turns[number].logprobs) for number, found in self.teacher.items()}

    @property
    def own_turns(self) -> list[int]:
        """Numbers of the turns that are trained, in their order."""
        return sorted(self.turns.keys() - self.untrained)

    @property
    def trained_turns(self) -> list[tuple[int, int]]:
        """Version and number of generated tokens of each turn that is trained."""
        own = (turn for turn in self.turns.values() if turn.turn not in self.untrained)
        return [(turn.version, len(unpack_ids(turn.output_ids))) for turn in own]

    @property
    def longest_turn(self) -> int:
        """Most tokens generated in one turn that is trained."""
        return max((length for _, length in self.trained_turns), default=0)

    @property
    def is_truncated(self) -> bool:
        """Whether maxTurns (of any agent) ended the episode, or maxTokens or the context window ended one of this agent's last turns."""
        own = (self.turns[leaf] for leaf in self.leaves if leaf not in self.untrained)
        cut = (turn.stop_reason in (StopReason.LENGTH, StopReason.CONTEXT) for turn in own)
        return self.ending is Ending.MAX_TURNS or any(cut)


def held_out_apart(members: Sequence[Trajectory], num_agents: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """Split demonstrated trajectories into trained demonstrations, and held-out ones that are measured only (`names.is_measured`).

    num_agents: number of the job's agents.
    """
    trained = [_part(member, num_agents, measured=False) for member in members]
    held_out = (_part(member, num_agents, measured=True) for member in members)
    return trained, [member for member in held_out if member.leaves]


def _part(member: Trajectory, num_agents: int, *, measured: bool) -> Trajectory:
    leaves = tuple(leaf for leaf in member.leaves if is_measured(leaf, num_agents) is measured)
    turns = {number: turn for number, turn in member.turns.items() if is_measured(number, num_agents) is measured}
    return replace(member, leaves=leaves, turns=turns)


async def read_group(bus: Bus, blobs: Blobs, group: GroupReady, expected: Expectation) -> list[Trajectory]:
    """Read a group's trajectories, in the order of its members.

    Raises:
        TrajectoryInvalid: a recorded turn contradicts its group or its job.
        TurnMissing: a turn is not on the stream.
    """
    reader = _TurnReader(bus, blobs, group)
    members = await await_all(reader.trajectory(ref) for ref in group.trajectories)
    for ref, turns in zip(group.trajectories, members, strict=True):
        for turn in turns.values():
            check_turn(turn, group, ref, expected)
        if strangers := {one.turn for one in ref.turn_rewards} - turns.keys():
            text = f"episode {ref.episode} has a reward for turn {min(strangers)} of {group.agent}, which is none of its turns"
            raise TrajectoryInvalid(text)
    pairs = list(zip(group.trajectories, members, strict=True))
    if expected.teacher is None or expected.is_demonstrated:
        return [_trajectory(ref, turns, {}) for ref, turns in pairs]
    scores = await await_all(reader.scores(ref, turns, expected.teacher) for ref, turns in pairs)
    return [_trajectory(ref, turns, found) for (ref, turns), found in zip(pairs, scores, strict=True)]


def _trajectory(
    ref: TrajectoryRef, turns: Mapping[int, Turn], teacher: Mapping[int, npt.NDArray[np.float32]]
) -> Trajectory:
    is_choice = ref.choice is not None
    return Trajectory(
        turns=turns,
        leaves=ref.leaves,
        reward=ref.reward,
        ending=ref.ending,
        compared_with=(ref.agent, ref.episode, ref.choice) if is_choice else ref.agent,
        # The context of a candidate is all but the candidate itself; else, it is the candidates of all choices.
        untrained=frozenset(turns.keys() - set(ref.leaves) if is_choice else ref.untrained),
        turn_rewards={one.turn: one.reward for one in ref.turn_rewards},
        teacher=teacher,
    )


def check_turn(turn: Turn, group: GroupReady, ref: TrajectoryRef, expected: Expectation) -> None:
    """Raise TrajectoryInvalid unless a turn matches its group and job, and was sampled by the group's version, or by a newer one if it may.

    A demonstrated turn must belong to a step that trains demonstrations, and a sampled one to another step.
    """
    if (turn.demonstration is not None) != expected.is_demonstrated:
        found, trained = (
            ("sampled", "demonstrations") if expected.is_demonstrated else ("demonstrated", "sampled replies")
        )
        raise _invalid(turn, f"its reply is {found}, and the step trains {trained}")
    wanted: dict[str, object] = {
        "namespace": group.namespace,
        "job": group.job,
        "uid": group.uid,
        "agent": ref.agent or group.agent,
        "group": group.group,
    }
    wanted |= {
        "member": ref.member,
        "episode": ref.episode,
        "temperature": 1.0 if expected.is_demonstrated else expected.temperature,
    }
    if not expected.is_demonstrated and not (
        expected.refreshes and group.version <= turn.version <= group.base_version
    ):
        wanted["version"] = group.version
    if turn.version in expected.adapters and not expected.is_demonstrated:
        wanted["adapter_sha256"] = expected.adapters[turn.version]
    for name, value in wanted.items():
        if getattr(turn, name) != value:
            raise _invalid(turn, f"{name} is {getattr(turn, name)!r}, and the group has {value!r}")
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
    if len(logprobs) != (len(output) if turn.demonstration is None else 0):
        raise _invalid(turn, f"{len(output)} generated tokens with {len(logprobs)} logprobs")
    if turn.opens_segment and len(output) and not len(prompt):
        raise _invalid(turn, "it opens a segment without a prompt")
    if not np.isfinite(logprobs).all() or (logprobs > ROUNDING).any():
        raise _invalid(turn, "a logprob is above zero or not finite")
    ids = np.concatenate([prompt, output])
    if ((ids < 0) | (ids >= vocab_size)).any():
        raise _invalid(turn, f"a token id is outside the vocabulary of {vocab_size}")


def _lineage(turns: Mapping[int, Turn], leaf: int) -> list[Turn]:
    """Return a turn and its ancestors, oldest first."""
    path = [turns[leaf]]
    while (parent := path[-1].parent) is not None:
        path.append(turns[parent])
    return path[::-1]


def scores_of(
    record: Turn, scored: Sequence[Turn], wanted: tuple[GroupReady, TrajectoryRef, str]
) -> dict[int, npt.NDArray[np.float32]]:
    """Return a teacher's logprobs of the generated tokens of a conversation's turns, by turn number.

    Args:
        record: the teacher's scores of the whole conversation.
        scored: the turns of the conversation, oldest first.
        wanted: the group, the trajectory and the teacher's name that the record must have.

    Raises:
        TrajectoryInvalid: the record is of another conversation, or its logprobs are not of these turns' tokens.
    """
    group, ref, teacher = wanted
    own = (record.namespace, record.job, record.uid, record.group, record.member, record.episode, record.agent)
    names = (group.namespace, group.job, group.uid, group.group, ref.member, ref.episode, teacher)
    if own != names or record.scores != scored[-1].turn or record.temperature != 1.0:
        raise _invalid(record, f"it is not the score of turn {scored[-1].turn} by {teacher} at temperature 1")
    lengths = [len(unpack_ids(turn.output_ids)) for turn in scored]
    logprobs = unpack_logprobs(record.logprobs)
    if len(logprobs) != sum(lengths):
        raise _invalid(record, f"{len(logprobs)} scores of {sum(lengths)} generated tokens")
    if np.isinf(logprobs).any() or (logprobs > ROUNDING).any():
        raise _invalid(record, "a score is above zero or infinite")
    parts = np.split(logprobs, np.cumsum(lengths)[:-1])
    return {turn.turn: part for turn, part in zip(scored, parts, strict=True)}


class _TurnReader:
    """Reads one group's turns, at most MAX_CONCURRENT_READS at a time."""

    def __init__(self, bus: Bus, blobs: Blobs, group: GroupReady) -> None:
        self._bus, self._blobs, self._group = bus, blobs, group
        self._gate = asyncio.Semaphore(MAX_CONCURRENT_READS)

    async def trajectory(self, ref: TrajectoryRef) -> dict[int, Turn]:
        """Read all turns from a trajectory's leaves back to its first turns, by number."""
        turns: dict[int, Turn] = {}
        wanted = set(ref.leaves)
        while wanted:
            found = await await_all(self._turn(ref.episode, number) for number in sorted(wanted))
            turns |= {turn.turn: turn for turn in found}
            wanted = {turn.parent for turn in found if turn.parent is not None} - turns.keys()
        return turns

    async def scores(
        self, ref: TrajectoryRef, turns: Mapping[int, Turn], teacher: str
    ) -> dict[int, npt.NDArray[np.float32]]:
        """Read a teacher's logprobs of a trajectory's generated tokens, by turn. Raises as `read_group`."""
        found: dict[int, npt.NDArray[np.float32]] = {}
        scored = await await_all(self._turn(ref.episode, SCORES + leaf) for leaf in ref.leaves)
        for leaf, record in zip(ref.leaves, scored, strict=True):
            found = scores_of(record, _lineage(turns, leaf), (self._group, ref, teacher)) | found
        return found

    async def _turn(self, episode: str, number: int) -> Turn:
        subject = subjects.turn(self._group.namespace, self._group.job, episode, number)
        async with self._gate:
            stored = await self._bus.last(subjects.TURNS, subject)
            if stored is None:
                raise TurnMissing(f"turn {subject} is not recorded")
            message = await wire.unpack(stored.data, self._blobs, subject)
        if not isinstance(message, Turn) or message.turn != number:
            raise TrajectoryInvalid(f"{subject} holds something other than this turn: {type(message).__name__}")
        return message


def _invalid(turn: Turn, text: str) -> TrajectoryInvalid:
    where = subjects.turn(turn.namespace, turn.job, turn.episode, turn.turn)
    return TrajectoryInvalid(f"turn {where}, recorded by {turn.replica}: {text}")
