"""Segments into rows, purely: what several segments of a group begin with is computed once.

The trajectories of a group share their prompt, and the branches of a conversation their past. A row is therefore a tree of tokens, laid out
parents first, in which a token sees its ancestors alone: its hidden state is the one that it has in a row of its own, and every generated
token is predicted from the token before it in its own segment. (The idea of Prefix Grouper, arXiv 2506.05433, for any tree.)

Sharing saves the rest of the network and costs attention: a tree's attention is computed between all pairs of its tokens. So a
segment joins a tree only where that pays.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens that a model saw as one context, and which of them are trained.

    ids: int32 [T]. generated: bool [T], true where a token was sampled and is trained here (never at 0). behaviour: float32 [T], logprobs where
    generated, else 0. version: the policy version that sampled the generated tokens. advantage: of the trajectory. trajectory: a number that the segments
    of one trajectory share. trajectory_tokens: generated tokens of the whole trajectory; None: the segment is all of it.
    """

    ids: npt.NDArray[np.int32]
    generated: npt.NDArray[np.bool_]
    behaviour: npt.NDArray[np.float32]
    version: int
    advantage: float
    trajectory: int = 0
    trajectory_tokens: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_trajectory_tokens(self) -> int:
        """Generated tokens of the whole trajectory."""
        return int(self.generated.sum()) if self.trajectory_tokens is None else self.trajectory_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A tree of tokens, and the generated tokens that it predicts.

    ids, parents, depths: int32 [T]; a root's parent is -1 and its depth 0. before, targets: int32 [N], the place from which each generated token
    is predicted, and its id. behaviour, advantages: float32 [N]. sequences: int32 [N], which of the row's num_segments segments it belongs to.
    trajectories, lengths: int32 [N], the trajectory that it belongs to, and that trajectory's number of generated tokens, in this row or not.
    num_segment_tokens: tokens of its segments, shared ones counted in each.
    """

    ids: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]
    before: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    behaviour: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    sequences: npt.NDArray[np.int32]
    trajectories: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]
    num_segments: int
    num_segment_tokens: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_chain(self) -> bool:
        """No token has two children: plain causal attention."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())


def chain(segment: Segment) -> Row:
    """A segment in a row of its own."""
    tree = _Tree()
    tree.add(segment)
    return tree.row()


def plant(segments: Iterable[Segment], pairs_per_token: int, budget: int) -> list[Row]:
    """Rows of one group's segments, short segments first, so that neighbours pad each other little.

    pairs_per_token: how many pairs of tokens in attention cost as much as one token in all the rest; 0 shares nothing. budget: the most tokens
    that a shared row may have.
    """
    trees: list[_Tree] = []
    for segment in sorted(segments, key=len):
        gains = [tree.gain(segment, pairs_per_token, budget) for tree in trees]
        if max(gains, default=0) <= 0:
            trees.append(_Tree())
            gains.append(1)
        trees[gains.index(max(gains))].add(segment)
    return [tree.row() for tree in trees]


@dataclass(slots=True)
class _Tree:
    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    predicted: list[tuple[int, int, float, float, int, int, int]] = field(default_factory=list)
    num_segments: int = 0
    num_segment_tokens: int = 0

    def gain(self, segment: Segment, pairs_per_token: int, budget: int) -> int:
        """What is saved by adding a segment here rather than in a row of its own, in pairs of tokens in attention."""
        if not pairs_per_token:
            return 0
        shared = self._shared(segment)
        size, new = len(self.ids), len(segment) - shared
        if size + new > budget:
            return 0
        alone = len(segment) ** 2 // 2  # a plain causal row skips half of its pairs
        return shared * pairs_per_token - new * (2 * size + new) + alone if shared else 0

    def add(self, segment: Segment) -> None:
        """Put a segment in, making only the tokens that are not there."""
        place, before = -1, -1
        shared = segment.advantage, self.num_segments, segment.trajectory, segment.num_trajectory_tokens
        values = zip(segment.ids.tolist(), segment.generated.tolist(), segment.behaviour.tolist(), strict=True)
        for token, generated, behaviour in values:
            before, place = place, self._child(place, token)
            if generated:
                self.predicted.append((before, token, behaviour, *shared))
        self.num_segments += 1
        self.num_segment_tokens += len(segment)

    def row(self) -> Row:
        before, targets, behaviour, advantages, sequences, trajectories, lengths = (
            zip(*self.predicted, strict=True) if self.predicted else ((),) * 7
        )
        return Row(
            ids=np.array(self.ids, np.int32),
            parents=np.array(self.parents, np.int32),
            depths=np.array(self.depths, np.int32),
            before=np.array(before, np.int32),
            targets=np.array(targets, np.int32),
            behaviour=np.array(behaviour, np.float32),
            advantages=np.array(advantages, np.float32),
            sequences=np.array(sequences, np.int32),
            trajectories=np.array(trajectories, np.int32),
            lengths=np.array(lengths, np.int32),
            num_segments=self.num_segments,
            num_segment_tokens=self.num_segment_tokens,
        )

    def _shared(self, segment: Segment) -> int:
        place = -1
        for count, token in enumerate(segment.ids.tolist()):
            child = self.children.get((place, token))
            if child is None:
                return count
            place = child
        return len(segment)

    def _child(self, place: int, token: int) -> int:
        child = self.children.setdefault((place, token), len(self.ids))
        if child == len(self.ids):
            self.ids.append(token)
            self.parents.append(place)
            self.depths.append(0 if place < 0 else self.depths[place] + 1)
        return child
