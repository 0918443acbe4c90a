"""A linear layer and its adapter as one operation: PEFT's numbers with fewer passes over memory.

PEFT writes the adapter's share, the scaled share and the sum as tensors of their own, and autograd does the same on the way back. Here the share is
added where the layer's output already lies (GEMM with beta 1); what is kept for the backward pass is the input, which the layer
before holds anyway. A zero adapter still changes no bit: zeros are added.
"""

from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn


def fuse(model: nn.Module) -> None:
    """Make every adapted linear layer compute in one operation, where base and adapter have one dtype. Repeated calls change nothing."""
    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear and "forward" not in vars(module):
            module.forward = partial(_forward, module)


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    base = layer.base_layer
    if layer.disable_adapters or not active:
        result: Tensor = base(hidden)
        return result
    down, up = layer.lora_A[active[0]].weight, layer.lora_B[active[0]].weight
    if len(active) > 1 or hidden.dtype != down.dtype or base.weight.dtype != down.dtype:
        several: Tensor = Linear.forward(layer, hidden)
        return several
    fused: Tensor = _AdaptedLinear.apply(hidden, base.weight, base.bias, down, up, layer.scaling[active[0]])  # type: ignore[no-untyped-call]
    return fused


class _AdaptedLinear(torch.autograd.Function):
    """hidden [..., in], weight [out, in] and bias (frozen), down [rank, in], up [out, rank], scaling: to [..., out]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        hidden, weight, bias, down, up, scaling = inputs
        flat = hidden.reshape(-1, hidden.shape[-1])
        low = flat @ down.T
        result = nn.functional.linear(flat, weight, bias).addmm_(low, up.T, alpha=scaling)
        ctx.save_for_backward(hidden, weight, down, up, low)
        ctx.scaling = scaling
        return result.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, down, up, low = ctx.saved_tensors
        flat, slope = hidden.reshape(-1, hidden.shape[-1]), upstream[0].reshape(-1, weight.shape[0])
        slope_low = (slope @ up).mul_(ctx.scaling)
        slope_hidden = None
        if ctx.needs_input_grad[0]:
            slope_hidden = (slope @ weight).addmm_(slope_low, down).view(hidden.shape)
        slope_up = (slope.T @ low).mul_(ctx.scaling)
        return slope_hidden, None, None, slope_low.T @ flat, slope_up, None
