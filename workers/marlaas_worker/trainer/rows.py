"""Segments into rows, purely: what several segments of a group begin with is computed once.

The trajectories of a group share their prompt, and the branches of a conversation their past. A row is therefore a tree of tokens, laid out
parents first, in which a token sees its ancestors alone: its hidden state is the one that it has in a row of its own, and every generated
token is predicted from the token before it in its own segment. (The idea of Prefix Grouper, arXiv 2506.05433, for any tree.)

Sharing saves the rest of the network and costs attention: a tree's attention is computed between all pairs of its tokens. So a
segment joins a tree only where that pays.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

D = TypeVar("D", bound=np.generic)


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
    tree.add(segment, _Begin(0, _NOWHERE))
    return tree.row()


def pack_prefix_tree(segments: Iterable[Segment], pairs_per_token: int, budget: int) -> list[Row]:
    """Rows of one group's segments, short segments first, so that neighbours pad each other little.

    pairs_per_token: how many pairs of tokens in attention cost as much as one token in all the rest; 0 shares nothing. budget: the most tokens
    that a shared row may have.
    """
    trees: list[_Tree] = []
    for segment in sorted(segments, key=len):
        begins = [tree.begin(segment) if pairs_per_token else _Begin(0, _NOWHERE) for tree in trees]
        gains = [tree.gain(segment, begin, pairs_per_token, budget) for tree, begin in zip(trees, begins, strict=True)]
        if max(gains, default=0) <= 0:
            trees.append(_Tree())
            begins.append(_Begin(0, _NOWHERE))
            gains.append(1)
        best = gains.index(max(gains))
        trees[best].add(segment, begins[best])
    return [tree.row() for tree in trees]


_NOWHERE = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class _Begin:
    """What of a segment a tree has: its first `length` tokens, at the first `length` of these places."""

    length: int
    places: npt.NDArray[np.int32]


@dataclass(slots=True)
class _Tree:
    """Segments as runs of new tokens. num_tokens: of all runs. paths: every segment's ids, and the place of each of its tokens."""

    num_tokens: int = 0
    num_segment_tokens: int = 0
    ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    parents: list[npt.NDArray[np.int32]] = field(default_factory=list)
    depths: list[npt.NDArray[np.int32]] = field(default_factory=list)
    paths: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = field(default_factory=list)
    before: list[npt.NDArray[np.int32]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def begin(self, segment: Segment) -> _Begin:
        """The longest beginning that the segment has in common with one of the tree's."""
        best = _Begin(0, _NOWHERE)
        for ids, places in self.paths:
            if (length := _common(segment.ids, ids)) > best.length:
                best = _Begin(length, places)
        return best

    def gain(self, segment: Segment, begin: _Begin, pairs_per_token: int, budget: int) -> int:
        """What is saved by adding a segment here rather than in a row of its own, in pairs of tokens in attention."""
        size, new = self.num_tokens, len(segment) - begin.length
        if size + new > budget or not begin.length:
            return 0
        alone = len(segment) ** 2 // 2  # a plain causal row skips half of its pairs
        return begin.length * pairs_per_token - new * (2 * size + new) + alone

    def add(self, segment: Segment, begin: _Begin) -> None:
        """Put a segment in, making only the tokens that are not there."""
        made = np.arange(self.num_tokens, self.num_tokens + len(segment) - begin.length, dtype=np.int32)
        places = np.concatenate([begin.places[: begin.length], made])
        previous = np.concatenate([[-1], places[:-1]]).astype(np.int32)
        self.ids.append(segment.ids[begin.length :])
        self.parents.append(previous[begin.length :])
        self.depths.append(np.arange(begin.length, len(segment), dtype=np.int32))
        self.paths.append((segment.ids, places))
        self.before.append(previous[segment.generated])
        self.segments.append(segment)
        self.num_tokens += len(made)
        self.num_segment_tokens += len(segment)

    def row(self) -> Row:
        """The tree as arrays."""
        counts = [len(before) for before in self.before]
        advantages = np.array([segment.advantage for segment in self.segments], np.float32)
        trajectories = np.array([segment.trajectory for segment in self.segments], np.int32)
        lengths = np.array([segment.num_trajectory_tokens for segment in self.segments], np.int32)
        return Row(
            ids=joined(self.ids, np.int32),
            parents=joined(self.parents, np.int32),
            depths=joined(self.depths, np.int32),
            before=joined(self.before, np.int32),
            targets=joined([segment.ids[segment.generated] for segment in self.segments], np.int32),
            behaviour=joined([segment.behaviour[segment.generated] for segment in self.segments], np.float32),
            advantages=np.repeat(advantages, counts),
            sequences=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            trajectories=np.repeat(trajectories, counts),
            lengths=np.repeat(lengths, counts),
            num_segments=len(self.segments),
            num_segment_tokens=self.num_segment_tokens,
        )


def _common(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    """How many tokens two runs begin with in common."""
    length = min(len(left), len(right))
    differ = left[:length] != right[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def joined(arrays: Sequence[npt.NDArray[Any]], dtype: type[D]) -> npt.NDArray[D]:
    """One array of `dtype`, also of no arrays."""
    whole: npt.NDArray[D] = np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
    return whole
