"""Segments into padded micro-batches, purely: which tokens share a forward pass depends on the step's data alone, never on when it came."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens that a model saw as one context, and which of them are trained.

    ids: int32 [T]. generated: bool [T], true where a token was sampled and is trained here (never at 0). behaviour: float32 [T], logprobs where
    generated, else 0. version: the policy version that sampled the generated tokens. advantage: of the trajectory.
    """

    ids: npt.NDArray[np.int32]
    generated: npt.NDArray[np.bool_]
    behaviour: npt.NDArray[np.float32]
    version: int
    advantage: float

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Right-padded rows for one forward and backward pass.

    ids: int64 [B, T], 0 beyond a row's end. rows, columns: int64 [N], where the generated tokens are. behaviour, advantages: float32 [N], theirs.
    A causal decoder lets no token see a later one, so the padding changes nothing and needs no attention mask.
    """

    ids: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    behaviour: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]

    @property
    def num_padded_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return int(self.ids.size)


def in_training_order(segments: Iterable[Segment]) -> list[Segment]:
    """One group's segments, short ones first, so that neighbours pad each other little; equal lengths stay in order."""
    return sorted(segments, key=len)


def pack(
    pending: Sequence[Segment], arriving: Iterable[Segment], budget: int
) -> tuple[list[list[Segment]], list[Segment]]:
    """Greedily fill micro-batches of at most `budget` padded tokens, in order: the full ones, and what waits for more.

    A segment longer than the budget goes alone. However a sequence of segments is cut into arrivals, the same micro-batches come out.
    """
    full: list[list[Segment]] = []
    open_batch, longest = list(pending), max(map(len, pending), default=0)
    for segment in arriving:
        if open_batch and max(longest, len(segment)) * (len(open_batch) + 1) > budget:
            full.append(open_batch)
            open_batch, longest = [], 0
        open_batch.append(segment)
        longest = max(longest, len(segment))
    return full, open_batch


def collate(segments: Sequence[Segment]) -> MicroBatch:
    """Pad segments into one micro-batch."""
    ids = np.zeros((len(segments), max(map(len, segments), default=0)), dtype=np.int64)
    for row, segment in enumerate(segments):
        ids[row, : len(segment)] = segment.ids
    columns = [np.flatnonzero(segment.generated) for segment in segments]
    counts = [len(positions) for positions in columns]
    behaviour = [segment.behaviour[positions] for segment, positions in zip(segments, columns, strict=True)]
    return MicroBatch(
        ids=ids,
        rows=np.repeat(np.arange(len(segments), dtype=np.int64), counts),
        columns=np.concatenate([np.zeros(0, np.int64), *columns]),
        behaviour=np.concatenate([np.zeros(0, np.float32), *behaviour]),
        advantages=np.repeat(np.array([segment.advantage for segment in segments], np.float32), counts),
    )
