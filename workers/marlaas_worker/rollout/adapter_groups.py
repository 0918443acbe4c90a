"""LoRA for mixed batches on a CPU: one small matrix product for each adapter of the batch.

vLLM 0.32 gathers A and B for every token (`lora/ops/torch_ops/lora_ops.py`), which costs more than the base
model itself. It also applies the last slot to rows without an adapter. Here rows are grouped by adapter, and
rows without an adapter stay unchanged. Pure torch; does not import vLLM.
"""

from collections.abc import Sequence

import torch

Rows = slice | torch.Tensor
Groups = Sequence[tuple[int, Rows]]


def group_rows(slots: torch.Tensor) -> Groups:
    """Return the rows of each slot; `slots` [T] has -1 for rows without an adapter. Consecutive rows become a slice."""
    groups: list[tuple[int, Rows]] = []
    for slot in torch.unique(slots).tolist():
        rows = (slots == slot).nonzero()[:, 0]
        first, last = int(rows[0]), int(rows[-1])
        if slot >= 0:
            groups.append((slot, slice(first, last + 1) if last - first + 1 == len(rows) else rows))
    return groups


def add_adapters(
    outputs: torch.Tensor,
    inputs: torch.Tensor,
    groups: Groups,
    a_stacked: Sequence[torch.Tensor],
    b_stacked: Sequence[torch.Tensor],
) -> None:
    """Add B @ A @ input to every grouped row of `outputs`, in place.

    Args:
        outputs: [T, sum of out]; the outputs of packed parts lie side by side.
        inputs: [T, in].
        a_stacked: for each packed part, [slots, 1, rank, in].
        b_stacked: for each packed part, [slots, 1, out, rank].
    """
    for slot, rows in groups:
        part = inputs[rows]
        deltas = [(part @ a[slot, 0].T) @ b[slot, 0].T for a, b in zip(a_stacked, b_stacked, strict=True)]
        delta = deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=1)
        columns = outputs[:, : delta.shape[1]]
        if isinstance(rows, slice):
            columns[rows] += delta
        else:
            columns.index_add_(0, rows, delta)
