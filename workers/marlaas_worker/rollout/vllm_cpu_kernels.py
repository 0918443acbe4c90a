"""Faster kernels for vLLM on a CPU, installed by `vllm_extension` in vLLM's worker processes.

- Adapters: vLLM's are replaced by `adapter_groups`.
- RMS norms: vLLM 0.32 uses its compiled kernels on GPUs only (`vllm/kernels/vllm_c.py`). On a CPU it takes about ten
  tensor operations instead: for 16 rows of 64 values 56 µs instead of 4.
"""

from typing import Any

import torch
from torch import Tensor
from vllm import ir
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

from marlaas_worker.rollout.adapter_groups import SlotRows, StackedAdapters, add_adapters, group_rows, stacked_adapters
from marlaas_worker.rollout.engine_progress import Cell, attach_counters

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


class GroupedAdapters(PunicaWrapperCPU):  # type: ignore[misc]
    """vLLM's wrapper for linear layers, with rows grouped by slot once per forward pass."""

    _rows: SlotRows

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cells = attach_counters().cells
        self._stacked: dict[int, tuple[object, StackedAdapters]] = {}

    def update_metadata(self, *arguments: Any, **options: Any) -> None:
        super().update_metadata(*arguments, **options)
        self._rows = group_rows(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        *_: Any,
        **__: Any,
    ) -> None:
        """Add the adapters' outputs to `y`, in place. vLLM's scale is ignored: it is always 1, since B is already scaled."""
        self._cells[Cell.LAYERS] += 1
        known = self._stacked.get(id(lora_b_stacked))
        if known is None:  # The tuple is kept, so that no other one gets its id.
            known = lora_b_stacked, stacked_adapters(lora_a_stacked, lora_b_stacked)
            self._stacked[id(lora_b_stacked)] = known
        add_adapters(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), self._rows, known[1])
