"""Packs segments into rows, and rows into padded micro-batches, purely; a prefix that segments of a group share is computed once.

The trajectories of a group share their prompt, and the branches of a conversation share their past. A row is
therefore a tree of tokens, parents first, in which a token attends only to itself and its ancestors. A token's hidden state
is the same as in a row of its segment alone, and every generated token is predicted from the token before it in its own
segment. (The idea of Prefix Grouper, arXiv 2506.05433, for any tree.)

Sharing saves work in the rest of the network but costs attention, which is computed between all pairs of a tree's
tokens. So a segment joins a tree only where that reduces the total cost.

The packing of rows into micro-batches depends only on the step's data, never on arrival times.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

D = TypeVar("D", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of T tokens that a model processed as one context, and which of them are trained."""

    ids: npt.NDArray[np.int32]
    """[T]"""
    generated: npt.NDArray[np.bool_]
    """[T], true where a token was sampled and is trained here (never at 0)."""
    behaviour: npt.NDArray[np.float32]
    """[T], logprobs of generated tokens, else 0."""
    version: int
    """The policy version that sampled the last turn; training does not use it."""
    advantage: float | npt.NDArray[np.float32]
    """One for all generated tokens, or [T], one per token."""
    trajectory: int = 0
    """Number of the trajectory within its group."""
    trajectory_tokens: int | None = None
    """Generated tokens of the whole trajectory; None: the segment is the whole trajectory."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_trajectory_tokens(self) -> int:
        """Number of generated tokens of the whole trajectory."""
        return int(self.generated.sum()) if self.trajectory_tokens is None else self.trajectory_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A tree of T tokens, and the N generated tokens that it predicts."""

    ids: npt.NDArray[np.int32]
    """[T]"""
    parents: npt.NDArray[np.int32]
    """[T], -1 for a root."""
    depths: npt.NDArray[np.int32]
    """[T], 0 for a root."""
    before: npt.NDArray[np.int32]
    """[N], index in the row of the token from which each generated token is predicted."""
    targets: npt.NDArray[np.int32]
    """[N], ids of the generated tokens."""
    behaviour: npt.NDArray[np.float32]
    """[N], behaviour logprobs."""
    advantages: npt.NDArray[np.float32]
    """[N], of each generated token."""
    sequences: npt.NDArray[np.int32]
    """[N], the token's segment, below num_segments."""
    trajectories: npt.NDArray[np.int32]
    """[N], number of the token's trajectory within its group."""
    lengths: npt.NDArray[np.int32]
    """[N], number of generated tokens of that trajectory, including those in other rows."""
    num_segments: int
    """Number of segments that share the row."""
    num_segment_tokens: int
    """Total length of the segments; a shared token counts once per segment."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_chain(self) -> bool:
        """Whether no token has two children, so that plain causal attention suffices."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())


def chain(segment: Segment) -> Row:
    """Return a row that holds this segment only."""
    tree = _Tree()
    tree.add(segment, _Begin(0, _NOWHERE))
    return tree.row()


def pack_prefix_tree(segments: Iterable[Segment], pairs_per_token: int, budget: int) -> list[Row]:
    """Pack one group's segments into rows, short segments first, so that rows of a micro-batch need little padding.

    Args:
        segments: the segments of one group.
        pairs_per_token: number of token pairs in attention that cost as much as one token in the rest of the
            network; 0 disables sharing.
        budget: most tokens that a shared row may have.
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
    """Longest prefix of a segment that a tree already holds: `length` tokens, whose indices in the row are `places[:length]`."""

    length: int
    places: npt.NDArray[np.int32]


@dataclass(slots=True)
class _Tree:
    """A row under construction.

    Attributes:
        num_tokens: number of the row's tokens.
        num_segment_tokens: total length of the row's segments; a shared token counts once per segment.
        ids, parents, depths: one array for each segment, of the tokens that it added to the row; together they are the arrays of `Row`.
        paths: for each segment, the ids of all its tokens, and their indices in the row.
        before: one array for each segment, of its generated tokens; together they are `Row.before`.
        segments: the segments that were added, in order.
    """

    num_tokens: int = 0
    num_segment_tokens: int = 0
    ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    parents: list[npt.NDArray[np.int32]] = field(default_factory=list)
    depths: list[npt.NDArray[np.int32]] = field(default_factory=list)
    paths: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = field(default_factory=list)
    before: list[npt.NDArray[np.int32]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def begin(self, segment: Segment) -> _Begin:
        """Return the longest prefix that the segment shares with a segment of the tree, and where it is."""
        best = _Begin(0, _NOWHERE)
        for ids, places in self.paths:
            if (length := _common(segment.ids, ids)) > best.length:
                best = _Begin(length, places)
        return best

    def gain(self, segment: Segment, begin: _Begin, pairs_per_token: int, budget: int) -> int:
        """Return what adding a segment to this row saves compared with a row of its own, in token pairs of attention.

        0 if the segment shares no prefix with the row, or the row would exceed the budget; negative if sharing costs more.

        Args:
            begin: the segment's prefix that the row already holds (`begin`).
            pairs_per_token, budget: see `pack_prefix_tree`.
        """
        size, new = self.num_tokens, len(segment) - begin.length
        if size + new > budget or not begin.length:
            return 0
        alone = len(segment) ** 2 // 2  # plain causal attention skips half of its pairs
        return begin.length * pairs_per_token - new * (2 * size + new) + alone

    def add(self, segment: Segment, begin: _Begin) -> None:
        """Add a segment; only tokens beyond the shared prefix become new tokens of the row."""
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
        """Return the tree as arrays."""
        counts = [len(before) for before in self.before]
        advantages = [np.broadcast_to(one.advantage, len(one))[one.generated] for one in self.segments]
        trajectories = np.array([segment.trajectory for segment in self.segments], np.int32)
        lengths = np.array([segment.num_trajectory_tokens for segment in self.segments], np.int32)
        return Row(
            ids=joined(self.ids, np.int32),
            parents=joined(self.parents, np.int32),
            depths=joined(self.depths, np.int32),
            before=joined(self.before, np.int32),
            targets=joined([segment.ids[segment.generated] for segment in self.segments], np.int32),
            behaviour=joined([segment.behaviour[segment.generated] for segment in self.segments], np.float32),
            advantages=joined(advantages, np.float32),
            sequences=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            trajectories=np.repeat(trajectories, counts),
            lengths=np.repeat(lengths, counts),
            num_segments=len(self.segments),
            num_segment_tokens=self.num_segment_tokens,
        )


def _common(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    """Return the length of the common prefix of two arrays."""
    length = min(len(left), len(right))
    differ = left[:length] != right[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


def joined(arrays: Sequence[npt.NDArray[Any]], dtype: type[D]) -> npt.NDArray[D]:
    """Concatenate arrays as `dtype`; no arrays give an empty one."""
    whole: npt.NDArray[D] = np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
    return whole


@dataclass(frozen=True, slots=True, eq=False)
class TokenTrees:
    """Positions of tokens in trees, for rows that are trees: a token attends to itself and its ancestors.

    These are the tokens u with enters[u] <= enters[t] < leaves[u] for a token t. Padding attends to itself only, so that no softmax is
    over an empty set.
    """

    depths: npt.NDArray[np.int64]
    """[B, T], number of a token's ancestors: its position id."""
    enters: npt.NDArray[np.int32]
    """[B, T], each token's number in a depth-first order of the micro-batch's tokens."""
    leaves: npt.NDArray[np.int32]
    """[B, T], 1 + the largest number of a token and its descendants."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Right-padded rows [B, T] for one forward and backward pass, and the N generated tokens that they predict."""

    ids: npt.NDArray[np.int64]
    """[B, T], 0 beyond a row's end."""
    before: npt.NDArray[np.int64]
    """[N], index in the flattened ids from which each generated token is predicted."""
    targets: npt.NDArray[np.int64]
    """[N], ids of the generated tokens."""
    behaviour: npt.NDArray[np.float32]
    """[N], behaviour logprobs."""
    advantages: npt.NDArray[np.float32]
    """[N], of each generated token."""
    sequences: npt.NDArray[np.int64]
    """[N], the token's segment within the micro-batch; no segment is split."""
    trajectories: npt.NDArray[np.int64]
    """[N], number of the token's trajectory within its group."""
    lengths: npt.NDArray[np.int64]
    """[N], number of generated tokens of the token's trajectory, including those in other micro-batches."""
    trees: TokenTrees | None = None
    """None if every row is a chain: then causal attention suffices, because padding comes last."""

    @property
    def num_padded_tokens(self) -> int:
        """Number of tokens that the forward pass computes, padding included."""
        return int(self.ids.size)

    @property
    def num_masked_pairs(self) -> int:
        """Number of token pairs in a dense attention mask, which all layers share; 0 without a mask."""
        return 0 if self.trees is None else self.ids.size * self.ids.shape[1]


def pack(pending: Sequence[Row], arriving: Iterable[Row], budget: int) -> tuple[list[list[Row]], list[Row]]:
    """Greedily fill micro-batches of at most `budget` padded tokens, in order; return the full ones, and the rows left over.

    A row longer than the budget forms its own micro-batch. The result does not depend on how the rows are divided among calls.

    Args:
        pending: the rows that the call before left over.
        arriving: the new rows.
    """
    full: list[list[Row]] = []
    open_batch = list(pending)
    longest = max(map(len, pending), default=0)
    for row in arriving:
        if open_batch and max(longest, len(row)) * (len(open_batch) + 1) > budget:
            full.append(open_batch)
            open_batch, longest = [], 0
        open_batch.append(row)
        longest = max(longest, len(row))
    return full, open_batch


def padded_tokens(rows: Sequence[Row]) -> int:
    """Return the number of tokens that these rows take as one micro-batch, padding included."""
    return len(rows) * max(map(len, rows), default=0)


def collate(rows: Sequence[Row]) -> MicroBatch:
    """Pad rows into one micro-batch."""
    width = max(map(len, rows), default=0)
    plain = all(row.is_chain for row in rows)
    starts = range(0, len(rows) * width, width or 1)
    segments = itertools.accumulate((row.num_segments for row in rows), initial=0)
    return MicroBatch(
        ids=_padded([row.ids for row in rows], width),
        before=joined([row.before + start for row, start in zip(rows, starts, strict=True)], np.int64),
        targets=joined([row.targets for row in rows], np.int64),
        behaviour=joined([row.behaviour for row in rows], np.float32),
        advantages=joined([row.advantages for row in rows], np.float32),
        sequences=joined([row.sequences + start for row, start in zip(rows, segments, strict=False)], np.int64),
        trajectories=joined([row.trajectories for row in rows], np.int64),
        lengths=joined([row.lengths for row in rows], np.int64),
        trees=None if plain else _trees(rows, width),
    )


def _trees(rows: Sequence[Row], width: int) -> TokenTrees:
    parents = [[*row.parents.tolist(), *[-1] * (width - len(row))] for row in rows]  # each token of padding is a root
    firsts = np.arange(0, len(rows) * width, width, np.int32)[:, None, None]
    numbered = np.array([_depth_first(row) for row in parents], np.int32) + firsts
    return TokenTrees(_padded([row.depths for row in rows], width), numbered[:, 0], numbered[:, 1])


def _depth_first(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return `enters` and `leaves` of a row. parents: index of each token's parent, which comes before the token; -1 for a root."""
    sizes = [1] * len(parents) + [0]  # of subtrees; the last one is of all
    for place, parent in reversed(list(enumerate(parents))):
        sizes[parent] += sizes[place]
    free = [0] * len(sizes)  # the next number that is free for a child
    enters = []
    for place, parent in enumerate(parents):
        enters.append(free[parent])
        free[place] = free[parent] + 1
        free[parent] += sizes[place]
    return enters, [enter + size for enter, size in zip(enters, sizes, strict=False)]


def _padded(arrays: Sequence[npt.NDArray[np.int32]], width: int) -> npt.NDArray[np.int64]:
    padded = np.zeros((len(arrays), width), np.int64)
    for row, values in enumerate(arrays):
        padded[row, : len(values)] = values
    return padded
