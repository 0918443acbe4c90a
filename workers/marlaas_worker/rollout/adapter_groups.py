"""LoRA for mixed batches on a CPU: matrix products for long runs of one adapter, a compiled loop for all other rows.

vLLM 0.32 gathers A and B for every token (`lora/ops/torch_ops/lora_ops.py`), which costs more than the base
model itself. It also applies the adapter of the last slot to rows without an adapter. This module multiplies a run of neighbouring rows
of one adapter, as in prefill, by the adapter's matrices. It computes all other rows, as in decoding, one by one in a loop that Numba
compiles; vLLM depends on Numba. Rows without an adapter stay unchanged. Does not import vLLM.

In decoding, a batch has few rows of each adapter. Matrix products of so few rows take torch several microseconds each, for every
adapter and layer; the loop takes the same time for any number of adapters. The sums of a row have a fixed order, so its result
does not depend on other rows. Numba keeps the compiled code beside this file, or in the folder that `vllm_settings` chooses.

The loop computes sums in float32. With adapters in bfloat16, the product with A is rounded to bfloat16, as in vLLM's kernels and in the
trainer; the caller of the loop rounds the product with B.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray

_REORDERED = {"reassoc", "contract", "nsz", "arcp"}
"""Fast-math flags: LLVM may reorder sums when it compiles them. The order is then fixed. Infinite values and NaN stay correct."""
MIN_RUN = 32
"""Least number of neighbouring rows of one adapter for which matrix products are used. Fewer rows take less time in the loop (`add_rows`)."""


def _wide(stored: Any) -> Any:
    """Return a stored number, float32 or the bits of a bfloat16 (uint16), as float32. Numba compiles `_compiled_wide` instead."""


def _rounded(number: Any, stored: Any) -> Any:
    """Return `number`, a float32, rounded to the dtype of `stored`: float32, or bfloat16 if it is a uint16. See `_compiled_rounded`."""


@overload(_wide, strict=False)  # type: ignore[untyped-decorator]
def _compiled_wide(stored: types.Type) -> Callable[..., Any]:
    if stored == types.float32:
        return lambda stored: stored
    return lambda stored: np.uint32(np.uint32(stored) << 16).view(np.float32)


@overload(_rounded, strict=False)  # type: ignore[untyped-decorator]
def _compiled_rounded(number: types.Type, stored: types.Type) -> Callable[..., Any]:
    if stored == types.float32:
        return lambda number, stored: number

    def nearest_even(number: Any, stored: Any) -> Any:
        bits = np.float32(number).view(np.uint32)
        if np.isnan(number) or np.isinf(number):
            return number
        return np.uint32((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)

    return nearest_even


@njit(fastmath=_REORDERED, nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _multiply_with_a(hidden: NDArray[np.float32], inputs: NDArray[np.float32], a: NDArray[Any]) -> None:
    """Set hidden [rank] to a [rank, in] @ inputs [in], rounded to the precision of `a`."""
    for k in range(len(hidden)):
        total = np.float32(0)
        for i in range(len(inputs)):
            total += inputs[i] * _wide(a[k, i])
        hidden[k] = _rounded(total, a[k, 0])


@njit(fastmath=_REORDERED, nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _add_product_with_b(outputs: NDArray[np.float32], hidden: NDArray[np.float32], b: NDArray[Any]) -> None:
    """Add hidden [rank] @ b [rank, out] to outputs [out]."""
    in_fours = len(hidden) - len(hidden) % 4
    for k in range(0, in_fours, 4):  # four at once: each output is read and written less often
        h0, h1, h2, h3 = hidden[k], hidden[k + 1], hidden[k + 2], hidden[k + 3]
        for o in range(len(outputs)):
            outputs[o] += (
                h0 * _wide(b[k, o]) + h1 * _wide(b[k + 1, o]) + h2 * _wide(b[k + 2, o]) + h3 * _wide(b[k + 3, o])
            )
    for k in range(in_fours, len(hidden)):
        for o in range(len(outputs)):
            outputs[o] += hidden[k] * _wide(b[k, o])


@njit(fastmath=_REORDERED, nogil=True, cache=True)  # type: ignore[untyped-decorator]
def add_rows(  # noqa: PLR0913  # Numba compiles functions of arrays, not of our objects
    outputs: NDArray[np.float32],
    inputs: NDArray[np.float32],
    rows: NDArray[np.int64],
    slots: NDArray[np.int64],
    a: NDArray[Any],
    b: NDArray[Any],
    ends: NDArray[np.int64],
) -> None:
    """Add B @ A @ input to the given rows of `outputs`, in place, each with the adapter of its slot.

    Args:
        outputs: [T, sum of out] of a layer, for a batch of T rows. Always float32; the caller rounds them if the adapters are bfloat16.
        inputs: [T, in] of the layer.
        rows: [R] indices of the rows to change.
        slots: [R] the slot of each of these rows.
        a: [slots, parts, rank, in], as in `StackedAdapters`; float32, or uint16 with the bits of bfloat16.
        b: [slots, rank, sum of out], of the same dtype. A part's outputs depend on this part of `a` only.
        ends: [parts] index behind each part's last output.
    """
    num_parts, rank = a.shape[1], a.shape[2]
    hidden = np.empty(rank, np.float32)
    for place in range(len(rows)):
        row, slot = rows[place], slots[place]
        first = 0
        for part in range(num_parts):
            _multiply_with_a(hidden, inputs[row], a[slot, part])
            _add_product_with_b(outputs[row, first : ends[part]], hidden, b[slot, :, first : ends[part]])
            first = ends[part]


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The rows of a batch that have an adapter.

    Attributes:
        runs: pairs of a slot and a slice of at least `MIN_RUN` neighbouring rows that use the slot's adapter. A slot may have several runs.
        rows: [R] indices of all other rows that have an adapter.
        slots: [R] the slots of `rows`.
    """

    runs: Sequence[tuple[int, slice]]
    rows: NDArray[np.int64]
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StackedAdapters:
    """A layer's adapters in all slots; vLLM's tensors are views of the same memory.

    vLLM packs linear layers with the same input, such as q, k and v, into one layer. Each of these parts has its own A and B.

    Attributes:
        a: [slots, parts, rank, in], where `in` is the number of the layer's inputs.
        b: [slots, rank, sum of out], where `out` is a part's number of outputs. The outputs of packed parts lie side by side.
        ends: [parts] index behind each part's last output in the last dimension of `b`.
    """

    a: torch.Tensor
    b: torch.Tensor
    ends: NDArray[np.int64]


def group_rows(slots: torch.Tensor) -> SlotRows:
    """Group the rows of a batch by slot.

    slots: [T], where T is the number of rows (tokens) in the batch: the slot of each row's adapter; -1 for a row without an adapter.
    """
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
    return SlotRows(runs, np.array(others, np.int64), np.array([numbers[row] for row in others], np.int64))


def stacked_adapters(a_stacked: Sequence[torch.Tensor], b_stacked: Sequence[torch.Tensor]) -> StackedAdapters:
    """Copy a layer's adapters into a new memory layout, and make vLLM's tensors views of it. Their shapes and values stay.

    In the new layout all packed parts of a slot's A lie one after another, and its B is one matrix [rank, sum of out], so that inner
    loops read memory in order. vLLM loads adapters into the shared memory and reads them back from it, so a slot's digest is that of the
    values that are applied.

    Args:
        a_stacked: for each packed part, [slots, 1, rank, in].
        b_stacked: for each packed part, [slots, 1, out, rank].
    """
    a = torch.cat(list(a_stacked), 1)
    b = torch.cat([part[:, 0].transpose(1, 2) for part in b_stacked], 2).contiguous()
    ends = list(itertools.accumulate(part.shape[2] for part in b_stacked))
    for part, (a_part, b_part) in enumerate(zip(a_stacked, b_stacked, strict=True)):
        _keep_in(a_part, a[:, part : part + 1])
        _keep_in(b_part, b[:, None, :, ends[part] - b_part.shape[2] : ends[part]].transpose(2, 3))
    return StackedAdapters(a, b, np.array(ends, np.int64))


def _keep_in(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Make the tensor share the memory of `view`, with the same shape and strides."""
    tensor.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def add_adapters(outputs: torch.Tensor, inputs: torch.Tensor, rows: SlotRows, adapters: StackedAdapters) -> None:
    """Add B @ A @ input to every row of `outputs` that has an adapter, in place. All values of B must be finite.

    Args:
        outputs: [T, sum of out] of the layer; the outputs of packed parts lie side by side.
        inputs: [T, in] of the layer.
        rows: the batch's rows by slot, from `group_rows`.
        adapters: the layer's adapters, from `stacked_adapters`.
    """
    for slot, run in rows.runs:
        _add_run(outputs[run], inputs[run], adapters, slot)
    if len(rows.rows):
        _add_single(outputs, inputs.contiguous(), rows, adapters)


def _add_run(outputs: torch.Tensor, inputs: torch.Tensor, adapters: StackedAdapters, slot: int) -> None:
    """Add the outputs of a slot's adapter to the N rows of a run, in place. outputs: [N, sum of out]. inputs: [N, in]."""
    rank = adapters.a.shape[2]
    hidden = inputs @ adapters.a[slot].flatten(0, 1).T
    first = 0
    for part, end in enumerate(adapters.ends):
        left, right = hidden[:, part * rank : (part + 1) * rank], adapters.b[slot, :, first:end]
        if outputs.dtype == torch.float32:
            outputs[:, first:end].addmm_(left, right)
        else:
            # addmm_ would round the sum alone; vLLM's kernels, and so the trainer, round the product too.
            outputs[:, first:end].add_(left @ right)
        first = end


def _add_single(outputs: torch.Tensor, inputs: torch.Tensor, rows: SlotRows, adapters: StackedAdapters) -> None:
    """Add to each of `rows.rows` the outputs of its adapter, in place, with `add_rows`. `outputs` and `inputs` are contiguous."""
    a, b = adapters.a, adapters.b
    if outputs.dtype == torch.float32:
        add_rows(outputs.numpy(), inputs.numpy(), rows.rows, rows.slots, a.numpy(), b.numpy(), adapters.ends)
        return
    products = torch.zeros(outputs.shape, dtype=torch.float32)
    bits = (tensor.view(torch.uint16).numpy() for tensor in (a, b))
    add_rows(products.numpy(), inputs.float().numpy(), rows.rows, rows.slots, *bits, adapters.ends)
    places = torch.from_numpy(rows.rows)
    outputs[places] += products[places].to(outputs.dtype)
