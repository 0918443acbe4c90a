"""LoRA adapters: their parameters, and a linear layer with its adapter as one operation: PEFT's results with fewer passes over memory.

PEFT stores the adapter's output, the scaled output and the sum as separate tensors, and autograd does the same in the
backward pass. Here the adapter's output is added in place to the layer's output (GEMM with beta 1). Only the input is
kept for the backward pass, and the layer before holds it anyway. A zero adapter still changes no bit, because it adds
zeros.

On a 16-bit base model an adapter stays float32. The forward pass computes with the values in an engine's slot: A, and
B times the scaling, in the base's dtype (`adapters.as_held`). It rounds where vLLM does (`lora/ops`): the layer's
output, the input times A, that times B, and the sum. Gradients pass through the rounding unchanged and are summed in
float32. PEFT would add the adapter's output in float32, which no engine does.

Each product of a 16-bit model is summed in float32 and rounded once; this holds for tensor cores, AMX and oneDNN. A CPU without such instructions
multiplies bfloat16 six times slower than float32 (bench/trainer.py). On such a CPU this module multiplies in float32 and then rounds: the
same result, except for the order of summation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from marlaas_api.errors import Permanent
from marlaas_api.names import derive_seed
from marlaas_worker.adapters import AdapterConfig

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


def fuse(model: nn.Module) -> None:
    """Replace the forward of linear layers by one operation with their adapter, and of frozen 16-bit layers by a faster one.

    Repeated calls change nothing.
    """
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if type(module) is Linear and type(module.base_layer) is nn.Linear:
            module.forward = partial(_forward, module)
        elif type(module) is nn.Linear and working_dtype(module.weight) != module.weight.dtype:
            module.forward = partial(_frozen, module)  # type: ignore[method-assign]


def _frozen(layer: Any, hidden: Tensor) -> Tensor:
    result: Tensor = _HalfLinear.apply(hidden, layer.weight, layer.bias, None, None, 1.0)  # type: ignore[no-untyped-call]
    return result


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    base = layer.base_layer
    if layer.disable_adapters or not active:
        result: Tensor = base(hidden)
        return result
    down, up = layer.lora_A[active[0]].weight, layer.lora_B[active[0]].weight
    kind = _operation(base.weight.dtype, down.dtype)
    if len(active) > 1 or hidden.dtype != base.weight.dtype or kind is None:
        several: Tensor = Linear.forward(layer, hidden)
        return several
    fused: Tensor = kind.apply(hidden, base.weight, base.bias, down, up, layer.scaling[active[0]])
    return fused


def _operation(base: torch.dtype, adapter: torch.dtype) -> Any:
    if base == adapter:
        return _AdaptedLinear
    return _HalfLinear if base in HALF else None


class _AdaptedLinear(torch.autograd.Function):
    """Autograd function of a linear layer with an adapter, in one dtype.

    Inputs: hidden [..., in], weight [out, in] and bias (frozen), down [rank, in], up [out, rank], scaling. Output:
    [..., out].
    """

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


class _HalfLinear(torch.autograd.Function):
    """As `_AdaptedLinear`, for hidden, weight and bias in 16 bits.

    down and up are float32, or both None for a layer without adapter.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        hidden, weight, bias, down, up, scaling = inputs
        working, dtype = working_dtype(weight), weight.dtype
        flat = hidden.reshape(-1, hidden.shape[-1]).to(working)
        offset = None if bias is None else bias.to(working)
        result, low = nn.functional.linear(flat, weight.to(working), offset).to(dtype), None
        if down is not None:
            held_down, held_up = _held(weight, down, up, scaling)
            low = (flat @ held_down.T).to(dtype)
            result += (low.to(working) @ held_up.T).to(dtype)
        ctx.save_for_backward(None if down is None else hidden, weight, down, up, low)
        ctx.scaling = scaling
        return result.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, down, up, low = ctx.saved_tensors
        working = working_dtype(weight)
        slope = upstream[0].reshape(-1, weight.shape[0]).to(working)
        slope_hidden = slope @ weight.to(working) if ctx.needs_input_grad[0] else None
        slope_down = slope_up = None
        if down is not None:
            held_down, held_up = _held(weight, down, up, ctx.scaling)
            slope_low = slope @ held_up
            if slope_hidden is not None:
                slope_hidden.addmm_(slope_low, held_down)
            slope_down = precise_product(slope_low.T, hidden.reshape(-1, hidden.shape[-1]))
            slope_up = precise_product(slope.T, low).mul_(ctx.scaling)
        if slope_hidden is not None:
            slope_hidden = slope_hidden.to(weight.dtype).view(*upstream[0].shape[:-1], -1)
        return slope_hidden, None, None, slope_down, slope_up, None


def _held(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return A and B with the values in an engine's slot, in the dtype in which they are multiplied."""
    dtype, working = weight.dtype, working_dtype(weight)
    return down.to(dtype).to(working), (up.to(dtype) * scaling).to(working)


class TargetUnknown(Permanent):
    """The base model has no linear layer of that name."""


class WeightsMismatch(Permanent):
    """Tensors do not fit the adapter into which they are loaded."""


@dataclass(frozen=True, slots=True, eq=False)
class AttachedAdapter:
    """An adapter on the base model. parameters: A [rank, in] and B [out, rank], float32, by their names in PEFT's file."""

    name: str
    config: AdapterConfig
    parameters: dict[str, nn.Parameter]

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the weights in host memory."""
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.parameters.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights into the adapter; parameters missing from `tensors` are unchanged. Raises WeightsMismatch."""
        for name, tensor in tensors.items():
            parameter = self.parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                found = "no such module" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise WeightsMismatch(f"{name} {tuple(tensor.shape)} does not fit this adapter ({found} here)")
        with torch.no_grad():
            for name, tensor in tensors.items():
                self.parameters[name].copy_(tensor)


def initial_weights(parameters: Mapping[str, Tensor], seed: int, agent: str) -> dict[str, Tensor]:
    """Return the weights of version 0: B zero, and A uniform in +-1/sqrt(in), as in PEFT.

    A depends only on the job's seed, the agent's name and the tensor's name.
    """
    weights = {}
    for name, parameter in parameters.items():
        weights[name] = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            draw = torch.Generator().manual_seed(derive_seed(seed, agent, name))
            bound = 1.0 / math.sqrt(parameter.shape[1])
            weights[name].uniform_(-bound, bound, generator=draw)
    return weights
