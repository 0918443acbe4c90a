"""LoRA for mixed batches on a CPU, in a few matrix products.

vLLM 0.32 gathers A and B for every token (`lora/ops/torch_ops/lora_ops.py`), which costs more than the base
model itself. It also applies the last slot to rows without an adapter. Here many neighbouring rows of one adapter, as
in prefilling, take two products with it, in place. All other rows, as in decoding, take one product with the A, and
one with the B, of all their adapters side by side; in between, each row keeps only the part of its own adapter. If
these rows are many per adapter, they are sorted by adapter and take two products each. Rows without an adapter stay
unchanged. Pure torch; does not import vLLM.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIN_RUN = 16
"""Least number of neighbouring rows of one adapter that take products of their own."""
MAX_MIXED_ROWS = 8
"""Most rows per adapter for the products of all adapters side by side: more rows make their unused part too large."""
MAX_SPAN = 4
"""Products of unused slots between used ones cost less than a copy of the used ones, up to this many slots per used one."""


@dataclass(frozen=True, slots=True)
class MixedRows:
    """Rows of several adapters, few of each.

    Attributes:
        rows: [R] places in the batch; None if they are the whole batch.
        slots: [S] the rows' slots, or all from the first to the last as a slice.
        foreign: [R, S, 1] whether a row does not belong to a slot.
    """

    rows: torch.Tensor | None
    slots: slice | torch.Tensor
    foreign: torch.Tensor


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The rows of a batch that have an adapter; each is in one of the three parts.

    Attributes:
        runs: slots, each with neighbouring rows.
        sorted: slots, each with the places of its rows.
        mixed: the rows that are computed side by side.
    """

    runs: Sequence[tuple[int, slice]]
    sorted: Sequence[tuple[int, torch.Tensor]]
    mixed: MixedRows | None


@dataclass(frozen=True, slots=True)
class StackedAdapters:
    """A layer's adapters in all slots. a: [slots, parts, rank, in]; b: for each packed part, [slots, rank, out]."""

    a: torch.Tensor
    b: Sequence[torch.Tensor]


def group_rows(slots: torch.Tensor) -> SlotRows:
    """Return the rows of each slot; `slots` [T] has -1 for rows without an adapter."""
    numbers = slots.tolist()
    runs: list[tuple[int, slice]] = []
    others: list[int] = []
    first = 0
    for slot, run in itertools.groupby(numbers):
        stop = first + len(list(run))
        if slot >= 0 and stop - first >= MIN_RUN:
            runs.append((slot, slice(first, stop)))
        elif slot >= 0:
            others.extend(range(first, stop))
        first = stop
    used = sorted({numbers[row] for row in others})
    if len(used) == 1 and others[-1] - others[0] < len(others):
        return SlotRows([*runs, (used[0], slice(others[0], others[-1] + 1))], (), None)
    if len(used) == 1 or len(others) > MAX_MIXED_ROWS * len(used):
        by_slot = {slot: torch.tensor([row for row in others if numbers[row] == slot]) for slot in used}
        return SlotRows(runs, list(by_slot.items()), None)
    return SlotRows(runs, (), _mixed(slots, others, used) if others else None)


def _mixed(slots: torch.Tensor, rows: list[int], used: list[int]) -> MixedRows:
    span = range(used[0], used[-1] + 1)
    has_span = len(span) <= MAX_SPAN * len(used)
    columns = torch.tensor(span if has_span else used, dtype=slots.dtype)
    places = None if len(rows) == len(slots) else torch.tensor(rows)
    own = slots if places is None else slots[places]
    return MixedRows(
        rows=places,
        slots=slice(span.start, span.stop) if has_span else columns,
        foreign=(own[:, None] != columns)[:, :, None],
    )


def stacked_adapters(a_stacked: Sequence[torch.Tensor], b_stacked: Sequence[torch.Tensor]) -> StackedAdapters:
    """Return views of vLLM's tensors of a layer, and change their memory layout. Shapes and values stay.

    Afterwards the A of several slots and of all packed parts are one matrix [slots * parts * rank, in] without a copy,
    and so are the B of several slots, [slots * rank, out]. What is read back from a slot is what is applied.

    Args:
        a_stacked: for each packed part, [slots, 1, rank, in].
        b_stacked: for each packed part, [slots, 1, out, rank].
    """
    together = torch.cat(list(a_stacked), 1)
    for part, a in enumerate(a_stacked):
        _keep_in(a, together[:, part : part + 1])
    for b in b_stacked:
        if not b.transpose(2, 3).is_contiguous():
            _keep_in(b, b.transpose(2, 3).contiguous().transpose(2, 3))
    return StackedAdapters(together, [b[:, 0].transpose(1, 2) for b in b_stacked])


def _keep_in(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Make the tensor this view of another one's memory."""
    tensor.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def add_adapters(outputs: torch.Tensor, inputs: torch.Tensor, rows: SlotRows, adapters: StackedAdapters) -> None:
    """Add B @ A @ input to every row of `outputs` that has an adapter, in place. Every B is finite.

    Args:
        outputs: [T, sum of out]; the outputs of packed parts lie side by side.
        inputs: [T, in].
    """
    for slot, run in rows.runs:
        _add_one(outputs[run], inputs[run], adapters, slot)
    for slot, places in rows.sorted:
        chosen = outputs[places]
        _add_one(chosen, inputs[places], adapters, slot)
        outputs[places] = chosen
    if rows.mixed is not None and rows.mixed.rows is None:
        _add_side_by_side(outputs, inputs, rows.mixed, adapters)
    elif rows.mixed is not None:
        chosen = outputs[rows.mixed.rows]
        _add_side_by_side(chosen, inputs[rows.mixed.rows], rows.mixed, adapters)
        outputs[rows.mixed.rows] = chosen


def _add_one(outputs: torch.Tensor, inputs: torch.Tensor, adapters: StackedAdapters, slot: int) -> None:
    """Add one adapter's outputs to all rows."""
    rank = adapters.a.shape[2]
    hidden = inputs @ adapters.a[slot].flatten(0, 1).T
    first = 0
    for part, b in enumerate(adapters.b):
        _add_product(outputs[:, first : first + b.shape[2]], hidden[:, part * rank : (part + 1) * rank], b[slot])
        first += b.shape[2]


def _add_side_by_side(outputs: torch.Tensor, inputs: torch.Tensor, mixed: MixedRows, adapters: StackedAdapters) -> None:
    """Add to each row the outputs of its own adapter; all rows are rows of `mixed`."""
    a = adapters.a[mixed.slots]
    hidden = (inputs @ a.flatten(0, 2).T).view(len(inputs), len(a), -1)
    # Zeros, not a product with 0: another adapter's infinite value would become NaN in this row.
    hidden.masked_fill_(mixed.foreign, 0.0)
    hidden = hidden.view(len(inputs), *a.shape[:3])
    first = 0
    for part, b in enumerate(adapters.b):
        own = hidden[:, :, part].flatten(1)
        _add_product(outputs[:, first : first + b.shape[2]], own, b[mixed.slots].flatten(0, 1))
        first += b.shape[2]


def _add_product(outputs: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left @ right, in place."""
    if outputs.dtype == torch.float32:
        outputs.addmm_(left, right)
    else:
        # addmm_ would round the sum alone; vLLM's kernels, and so the trainer, round the product too.
        outputs.add_(left @ right)
