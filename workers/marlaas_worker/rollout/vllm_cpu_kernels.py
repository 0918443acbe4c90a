"""Compiled RMS norms for vLLM on a CPU, installed by `vllm_extension` in vLLM's worker processes.

vLLM 0.32 uses its compiled kernels on GPUs only (`vllm/kernels/vllm_c.py`). On a CPU it takes about ten tensor operations
instead: for 16 rows of 64 values 56 µs instead of 4.
"""

import torch
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

PROVIDER = "cpu_c"
_WIDTH = 16
"""The kernels compute rows in vectors of at most this many values and refuse rows that do not divide into them."""


def register() -> None:
    """Offer the norms to vLLM under the name PROVIDER; done once in each process."""
    if PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_is_normable)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_is_addable, inplace=True)(_fused_add_rms_norm)


def _is_normable(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Return whether the kernel computes this norm. It reads its input as contiguous without a check."""
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.shape[-1] % _WIDTH == 0
        and x.is_contiguous()
    )


def _is_addable(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Return whether the kernel computes this norm; see `_is_normable`."""
    return x_residual.is_contiguous() and _is_normable(x, weight, epsilon, variance_size)


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


def _fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual
