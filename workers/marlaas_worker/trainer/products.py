"""Matrix products of a 16-bit model, rounded where an engine rounds, and fast on CPUs without 16-bit multiplication.

Each product is summed in float32 and rounded once; this holds for tensor cores, AMX and oneDNN. A CPU without such
instructions multiplies bfloat16 six times slower than float32 (bench/trainer.py). On such a CPU this module
multiplies in float32 and then rounds: the same result, except for the order of summation.
"""

from functools import cache

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def working_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which to multiply by this weight."""
    if weight.dtype in HALF and weight.device.type == "cpu" and not _multiplies_bfloat16():
        return torch.float32
    return weight.dtype


def precise_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32, or in the operands' own dtype if that is wider; for gradients of float32 parameters."""
    if left.dtype not in HALF and right.dtype not in HALF:
        return left @ right
    if left.device.type == "cuda" and left.dtype == right.dtype:
        return torch.mm(left, right, out_dtype=torch.float32)  # tensor cores; the result is not rounded to 16 bits
    return left.float() @ right.float()


@cache
def _multiplies_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
