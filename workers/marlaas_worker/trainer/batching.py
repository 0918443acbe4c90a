"""Packs rows into padded micro-batches, purely: the packing depends only on the step's data, never on arrival times."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from marlaas_worker.trainer.rows import Row, joined


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
