"""LoRA of single rows on a CPU: a loop that Numba compiles. vLLM depends on Numba.

In decoding, a batch has few rows of each adapter. Matrix products of so few rows take torch several microseconds each, for every
adapter and layer; the loop takes the same time for any number of adapters. The sums of a row have a fixed order, so its result
does not depend on other rows. Numba keeps the compiled code beside this file, or in the folder that `vllm_settings` chooses.

Sums are computed in float32. With adapters in bfloat16, the product with A is rounded to bfloat16, as in vLLM's kernels and in the
trainer; the caller rounds the product with B.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray

_REORDERED = {"reassoc", "contract", "nsz", "arcp"}
"""Fast-math flags: LLVM may reorder sums when it compiles them. The order is then fixed. Infinite values and NaN stay correct."""


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
        a: [slots, parts, rank, in], as in `adapter_groups.StackedAdapters`; float32, or uint16 with the bits of bfloat16.
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
