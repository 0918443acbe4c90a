"""LoRA for mixed batches on a CPU, in a few matrix products.

vLLM 0.32 gathers A and B for every token (`lora/ops/torch_ops/lora_ops.py`), which costs more than the base
model itself. It also applies the last slot to rows without an adapter. Here a batch with few rows per adapter, as
in decoding, takes one product with the A, and one with the B, of all its adapters side by side; in between, each
row keeps only the part of its own adapter. A batch with many rows per adapter, as in prefilling, is sorted by
adapter and takes two products per adapter. Rows without an adapter stay unchanged. Pure torch; does not import vLLM.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_MIXED_ROWS = 8
"""Most rows per adapter for the products of all adapters side by side: more rows make their unused part too large."""
MAX_SPAN = 4
"""Products of unused slots between used ones cost less than a copy of the used ones, up to this many slots per used one."""


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The rows of a batch by adapter slot.

    Attributes:
        groups: each slot with its rows in `order`, in ascending order of the slots.
        order: [rows with an adapter] the rows sorted by slot; None if they are sorted and all rows have an adapter.
        places: [T] each row's place in `order`; rows without an adapter are behind the last. None as `order`.
        slots: [S] the same slots, or all from the first to the last as a slice.
        foreign: [T, S, 1] whether a row does not belong to a slot.
    """

    groups: Sequence[tuple[int, slice]]
    order: torch.Tensor | None
    places: torch.Tensor | None
    slots: slice | torch.Tensor
    foreign: torch.Tensor

    @property
    def is_mixed(self) -> bool:
        """Whether the adapters of the batch have few rows each."""
        return len(self.groups) > 1 and len(self.foreign) <= MAX_MIXED_ROWS * len(self.groups)


@dataclass(frozen=True, slots=True)
class StackedAdapters:
    """A layer's adapters in all slots: for each packed part, A [slots, rank, in] and B [slots, rank, out]."""

    parts: Sequence[tuple[torch.Tensor, torch.Tensor]]


def group_rows(slots: torch.Tensor) -> SlotRows:
    """Return the rows of each slot; `slots` [T] has -1 for rows without an adapter."""
    numbers = slots.tolist()
    order = sorted((row for row, slot in enumerate(numbers) if slot >= 0), key=numbers.__getitem__)
    groups: list[tuple[int, slice]] = []
    for slot, rows in itertools.groupby(order, numbers.__getitem__):
        first = groups[-1][1].stop if groups else 0
        groups.append((slot, slice(first, first + len(list(rows)))))
    used = [slot for slot, _ in groups]
    span = range(used[0], used[-1] + 1) if used else range(0)
    has_span = len(span) <= MAX_SPAN * len(used)
    columns = torch.tensor(span if has_span else used, dtype=slots.dtype)
    is_sorted = order == list(range(len(numbers)))
    places = torch.full((len(numbers),), len(order))
    places[order] = torch.arange(len(order))
    return SlotRows(
        groups=groups,
        order=None if is_sorted else torch.tensor(order),
        places=None if is_sorted else places,
        slots=slice(span.start, span.stop) if has_span else columns,
        foreign=(slots[:, None] != columns)[:, :, None],
    )


def stacked_adapters(a_stacked: Sequence[torch.Tensor], b_stacked: Sequence[torch.Tensor]) -> StackedAdapters:
    """Return views of vLLM's tensors of a layer, and change the memory layout of the B. Shapes and values stay.

    Afterwards the B of several slots are one matrix [slots * rank, out] without a copy, and what is read back from a
    slot is what is applied.

    Args:
        a_stacked: for each packed part, [slots, 1, rank, in].
        b_stacked: for each packed part, [slots, 1, out, rank].
    """
    for b in b_stacked:
        if not b.transpose(2, 3).is_contiguous():
            stored = b.transpose(2, 3).contiguous()
            b.set_(stored.untyped_storage(), 0, b.shape, stored.transpose(2, 3).stride())
    return StackedAdapters([(a[:, 0], b[:, 0].transpose(1, 2)) for a, b in zip(a_stacked, b_stacked, strict=True)])


def add_adapters(outputs: torch.Tensor, inputs: torch.Tensor, rows: SlotRows, adapters: StackedAdapters) -> None:
    """Add B @ A @ input to every row of `outputs` that has an adapter, in place. Every B is finite.

    Args:
        outputs: [T, sum of out]; the outputs of packed parts lie side by side.
        inputs: [T, in].
    """
    if not rows.groups:
        return
    add = _side_by_side if rows.is_mixed else _one_by_one
    first = 0
    for a, b in adapters.parts:
        outputs[:, first : first + b.shape[2]] += add(inputs, rows, a, b)
        first += b.shape[2]


def _side_by_side(inputs: torch.Tensor, rows: SlotRows, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return what to add to each row, [T, out]. a: [slots, rank, in]; b: [slots, rank, out]."""
    a, b = a[rows.slots], b[rows.slots]
    hidden = (inputs @ a.flatten(0, 1).T).view(len(inputs), *a.shape[:2])
    # Zeros, not a product with 0: another adapter's infinite value would become NaN in this row.
    hidden.masked_fill_(rows.foreign, 0.0)
    return hidden.flatten(1) @ b.flatten(0, 1)


def _one_by_one(inputs: torch.Tensor, rows: SlotRows, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return what to add to each row, [T, out]. a: [slots, rank, in]; b: [slots, rank, out]."""
    chosen = inputs if rows.order is None else inputs[rows.order]
    deltas = [(chosen[part] @ a[slot].T) @ b[slot] for slot, part in rows.groups]
    if rows.places is None:
        return deltas[0] if len(deltas) == 1 else torch.cat(deltas)
    return torch.cat([*deltas, deltas[0].new_zeros(1, b.shape[2])])[rows.places]
