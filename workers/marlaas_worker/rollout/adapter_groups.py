"""LoRA for mixed batches on a CPU: matrix products for long runs of one adapter, a compiled loop for all other rows.

vLLM 0.32 gathers A and B for every token (`lora/ops/torch_ops/lora_ops.py`), which costs more than the base
model itself. It also applies the adapter of the last slot to rows without an adapter. This module multiplies a run of neighbouring rows
of one adapter, as in prefill, by the adapter's matrices. It computes all other rows, as in decoding, one by one with `adapter_loop`.
The loop's time does not depend on the number of adapters in the batch, and a row's result does not depend on the other rows. Rows
without an adapter stay unchanged. Does not import vLLM.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from marlaas_worker.rollout.adapter_loop import add_rows

MIN_RUN = 32
"""Least number of neighbouring rows of one adapter for which matrix products are used. Fewer rows take less time in `adapter_loop`."""


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
    """Add to each of `rows.rows` the outputs of its adapter, in place, with `adapter_loop`. `outputs` and `inputs` are contiguous."""
    a, b = adapters.a, adapters.b
    if outputs.dtype == torch.float32:
        add_rows(outputs.numpy(), inputs.numpy(), rows.rows, rows.slots, a.numpy(), b.numpy(), adapters.ends)
        return
    products = torch.zeros(outputs.shape, dtype=torch.float32)
    bits = (tensor.view(torch.uint16).numpy() for tensor in (a, b))
    add_rows(products.numpy(), inputs.float().numpy(), rows.rows, rows.slots, *bits, adapters.ends)
    places = torch.from_numpy(rows.rows)
    outputs[places] += products[places].to(outputs.dtype)
