"""Faster kernels for vLLM on a CPU: RMS norms, products with small weights, and LoRA. `vllm_extension` installs them in vLLM's processes.

Norms: vLLM 0.32 uses its compiled kernels on GPUs only (`vllm/kernels/vllm_c.py`). On a CPU it takes about ten tensor operations
instead: for 16 rows of 64 values 56 µs instead of 4.

Products: vLLM multiplies with oneDNN, which compiles a kernel for every number of rows that is not in its cache. A batch has another
number of rows in nearly every forward pass, and with small weights compiling takes longer than the product. Large weights stay with
oneDNN, which packs them once.

LoRA: `adapter_groups` in place of vLLM's own computation. vLLM imports the class by the name that `vllm_extension` gives it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm import ir
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

from marlaas_worker.rollout.adapter_groups import SlotRows, StackedAdapters, add_adapters, group_rows, stacked_adapters
from marlaas_worker.rollout.engine_progress import Cell, attach_counters

PROVIDER = "cpu_c"
_WIDTH = 16
"""Largest vector of the norm kernels, in values. A kernel refuses rows whose length is not a multiple of its vector's length."""
SMALL = 1 << 17
"""Most elements of a float32 weight that counts as small: half a MiB, which a core's cache holds."""


def register() -> None:
    """Register the norms with vLLM under the name PROVIDER, and let torch multiply small float32 layers. A second call does nothing."""
    if PROVIDER in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_is_normable)(_rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_is_addable, inplace=True)(_fused_add_rms_norm)
    utils.dispatch_cpu_unquantized_gemm = _choose_product(utils.dispatch_cpu_unquantized_gemm)


def _choose_product(chosen: Callable[[Any, bool], None]) -> Callable[[Any, bool], None]:
    """Return a function that sets `layer.cpu_linear`: to torch's product for small float32 weights, else by calling vLLM's `chosen`."""

    def choose(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.dim() == 2 and weight.dtype == torch.float32 and weight.numel() <= SMALL:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            chosen(layer, remove_weight)

    return choose


def _is_normable(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Return whether vLLM's kernel can compute this norm. The kernel takes its input to be contiguous, and does not check it."""
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
    """Return whether vLLM's kernel can add the residual and compute this norm; see `_is_normable`."""
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
    """Replaces vLLM's class that adds the adapters' outputs in linear layers. A row is one token of the batch.

    Groups rows by slot once per forward pass, not in each layer.
    """

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
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        *_: Any,
        **__: Any,
    ) -> None:
        """Add the adapters' outputs for `x` [..., in] to `y` [..., sum of out], in place.

        lora_a_stacked and lora_b_stacked are as for `stacked_adapters`. vLLM's scale is ignored: it is always 1, since B is scaled already.
        """
        self._cells[Cell.LAYERS] += 1
        known = self._stacked.get(id(lora_b_stacked))
        if known is None:  # Keep the tuple, so that no other tuple can get its id.
            known = lora_b_stacked, stacked_adapters(lora_a_stacked, lora_b_stacked)
            self._stacked[id(lora_b_stacked)] = known
        add_adapters(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), self._rows, known[1])
