"""LoRA adapters: their parameters, and linear layers that apply them with fewer passes over memory than PEFT.

Adapters are not part of the model. Its layers apply the adapter that one shared `ActiveAdapter` names, so switching
between adapters is one assignment, however many layers and adapters there are. An adapter's weights are views of one
buffer, as are its gradients: the optimizer and the serialisation need one operation for all of them.

PEFT stores the adapter's output, the scaled output and the sum as separate tensors, and autograd does the same in the
backward pass. Here the adapter's output is added in place to the layer's output (GEMM with beta 1). Of the large tensors,
only the input is saved for the backward pass, and the layer before saves it anyway; an input that can be recomputed from
tensors that are saved anyway (`Made`) is recomputed. A zero adapter still changes no bit, because it adds zeros.

On a 16-bit base model an adapter stays float32. The forward pass computes with the values in an engine's slot: A, and
B times the scaling, in the base's dtype (`adapters.as_held`). It rounds where vLLM does (`lora/ops`): the layer's
output, the input times A, that times B, and the sum. Gradients pass through the rounding unchanged and are summed in
float32. PEFT would add the adapter's output in float32, which no engine does. The values of the slot are computed once after
each change of the weights, in a buffer for all layers (`ActiveAdapter`).

Each product of a 16-bit model is summed in float32 and rounded once; this holds for tensor cores, AMX and oneDNN. A CPU
without such instructions multiplies bfloat16 six times slower than float32 (bench/trainer.py). On such a CPU this module
multiplies in float32 and then rounds: the same result, except for the order of summation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from marlaas_api.errors import Permanent
from marlaas_api.names import derive_seed
from marlaas_worker.adapters import AdapterConfig, tensor_name

HALF = (torch.bfloat16, torch.float16)


def working_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which to multiply by this weight: its own, or float32 on a CPU that multiplies in 16 bits slowly."""
    if weight.dtype in HALF and weight.device.type == "cpu" and not _multiplies_bfloat16():
        return torch.float32
    return weight.dtype


def precise_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in float32, or in the operands' own dtype if that is wider; for gradients of float32 parameters."""
    if left.dtype not in HALF and right.dtype not in HALF:
        return left @ right
    if left.device.type != "cpu" and left.dtype == right.dtype:
        return torch.mm(left, right, out_dtype=torch.float32)  # tensor cores; the result is not rounded to 16 bits
    return left.float() @ right.float()


@cache
def _multiplies_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class ActiveAdapter:
    """The adapter that a model's layers apply, shared by all of them. adapter: None for the base model alone.

    For a 16-bit model it caches a copy of the active adapter as in an engine's slot (`held`). A copy that an autograd graph needs stays
    alive with the graph.
    """

    def __init__(self) -> None:
        self.adapter: AttachedAdapter | None = None
        self._copied: tuple[AttachedAdapter, int, torch.dtype] | None = None
        self._copies: dict[str, tuple[Tensor, Tensor]] = {}

    def detach(self, adapter: "AttachedAdapter") -> None:
        """Free the cached copy of an adapter. If the adapter is active, no adapter is active afterwards."""
        if self.adapter is adapter:
            self.adapter = None
        if self._copied is not None and self._copied[0] is adapter:
            self._copied, self._copies = None, {}

    def held(self, layer: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B of the active adapter in a layer, with the values that they have in an engine's slot.

        There B is multiplied by the scaling, and both are rounded to the base model's dtype. They are returned in the dtype in which they
        are multiplied (`working_dtype`).

        Args:
            layer: name of the layer.
            weight: the layer's own weight, in 16 bits.
        """
        adapter = self.adapter
        assert adapter is not None
        # Every change of the weights, through the buffer or one of its parts, changes the version that torch counts.
        copied = adapter, adapter.flat._version, weight.dtype
        if self._copied != copied:
            self._copies = _as_in_slot(adapter, weight)
            self._copied = copied
        return self._copies[layer]


@torch.no_grad()
def _as_in_slot(adapter: "AttachedAdapter", weight: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    copy = adapter.flat.to(weight.dtype)
    torch._foreach_mul_(adapter.pairs(copy)[1::2], adapter.config.scaling)
    matrices = adapter.pairs(copy.to(working_dtype(weight)))
    return dict(zip(adapter.layers, zip(matrices[::2], matrices[1::2], strict=True), strict=True))


class Made(NamedTuple):
    """How to recompute a layer's input: `make(*parts)`, from tensors that are saved for the backward pass anyway."""

    make: Callable[..., Tensor]
    parts: tuple[Tensor, ...]


def remember(result: Tensor, made: Made) -> Tensor:
    """Attach to a tensor how to recompute it, and return the same tensor.

    A layer with an adapter that gets this tensor object as input saves `made.parts` instead of it, and recomputes it in the backward pass.
    """
    result.made = made  # type: ignore[attr-defined]
    return result


def adapt_layers(model: nn.Module, layers: Mapping[str, nn.Module], active: ActiveAdapter) -> None:
    """Replace the forward pass of a model's linear layers.

    Those in `layers`, which an adapter may target (by name), then apply the active adapter. All of them compute faster on CPUs that
    multiply in 16 bits slowly (`working_dtype`).
    """
    for name, layer in layers.items():
        layer.forward = partial(_forward, layer, name, active)
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = partial(_bare, module)  # type: ignore[method-assign]


def _bare(layer: Any, hidden: Tensor) -> Tensor:
    if working_dtype(layer.weight) == layer.weight.dtype:
        return nn.functional.linear(hidden, layer.weight, layer.bias)
    result: Tensor = _HalfLinear.apply(hidden, layer.weight, layer.bias, None, None, 1.0, None, None)  # type: ignore[no-untyped-call]
    return result


def _forward(layer: Any, name: str, active: ActiveAdapter, hidden: Tensor) -> Tensor:
    adapter = active.adapter
    matrices = None if adapter is None else adapter.layers.get(name)
    if adapter is None or matrices is None:
        return _bare(layer, hidden)
    is_half = layer.weight.dtype in HALF
    made = getattr(hidden, "made", None)
    kind: Any = _HalfLinear if is_half else _AdaptedLinear
    held = active.held(name, layer.weight) if is_half else None
    result: Tensor = kind.apply(hidden, layer.weight, layer.bias, *matrices, adapter.config.scaling, held, made)
    return result


class _AdaptedLinear(torch.autograd.Function):
    """Autograd function of a linear layer with an adapter; all tensors have one dtype.

    Inputs, in order:
        hidden: [..., in].
        weight, bias: [out, in], and [out] or None; frozen.
        down, up: the adapter's A [rank, in] and B [out, rank].
        scaling: factor of the adapter's output.
        held: not used; `_HalfLinear` has the same inputs.
        made: `Made`, from which hidden is recomputed in the backward pass; None: hidden is saved.

    Output: [..., out].
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        hidden, weight, bias, down, up, scaling, _, made = inputs
        flat = hidden.reshape(-1, hidden.shape[-1])
        low = flat @ down.T
        result = nn.functional.linear(flat, weight, bias).addmm_(low, up.T, alpha=scaling)
        ctx.save_for_backward(weight, down, up, low, *_to_keep(hidden, made))
        ctx.scaling, ctx.made = scaling, made and made.make
        return result.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        weight, down, up, low, *kept = ctx.saved_tensors
        slope = upstream[0].reshape(-1, weight.shape[0])
        slope_low = (slope @ up).mul_(ctx.scaling)
        slope_hidden = None
        if ctx.needs_input_grad[0]:
            slope_hidden = (slope @ weight).addmm_(slope_low, down).view(*upstream[0].shape[:-1], -1)
        slope_up = (slope.T @ low).mul_(ctx.scaling)
        return slope_hidden, None, None, slope_low.T @ _again(ctx.made, kept), slope_up, None, None, None


class _HalfLinear(torch.autograd.Function):
    """As `_AdaptedLinear`, for hidden, weight and bias in 16 bits.

    down and up are float32, and only receive gradients. Both passes multiply by held, the pair of A and B from `ActiveAdapter.held`.
    For a layer without adapter, down, up and held are None.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        hidden, weight, bias, _, _, scaling, held, made = inputs
        working = working_dtype(weight)
        dtype = weight.dtype
        flat = hidden.reshape(-1, hidden.shape[-1]).to(working)
        offset = None if bias is None else bias.to(working)
        result = nn.functional.linear(flat, weight.to(working), offset).to(dtype)
        low = None
        if held is not None:
            low = (flat @ held[0].T).to(dtype)
            result += (low.to(working) @ held[1].T).to(dtype)
        ctx.save_for_backward(weight, low, *(() if held is None else _to_keep(hidden, made)))
        ctx.scaling, ctx.held, ctx.made = scaling, held, made and made.make
        return result.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        weight, low, *kept = ctx.saved_tensors
        working = working_dtype(weight)
        slope = upstream[0].reshape(-1, weight.shape[0]).to(working)
        slope_hidden = slope @ weight.to(working) if ctx.needs_input_grad[0] else None
        slope_down = slope_up = None
        if ctx.held is not None:
            slope_low = slope @ ctx.held[1]
            if slope_hidden is not None:
                slope_hidden.addmm_(slope_low, ctx.held[0])
            slope_down = precise_product(slope_low.T, _again(ctx.made, kept))
            slope_up = precise_product(slope.T, low).mul_(ctx.scaling)
        if slope_hidden is not None:
            slope_hidden = slope_hidden.to(weight.dtype).view(*upstream[0].shape[:-1], -1)
        return slope_hidden, None, None, slope_down, slope_up, None, None, None


def _to_keep(hidden: Tensor, made: Made | None) -> tuple[Tensor, ...]:
    return (hidden,) if made is None else made.parts


def _again(make: Callable[..., Tensor] | None, kept: Sequence[Tensor]) -> Tensor:
    """Return a layer's input [tokens, in] from the saved tensors: the input itself, or the parts from which `make` recomputes it."""
    hidden = kept[0] if make is None else make(*kept)
    return hidden.reshape(-1, hidden.shape[-1])


class TargetUnknown(Permanent):
    """The base model has no linear layer of that name."""


class WeightsMismatch(Permanent):
    """Tensors do not fit the adapter into which they are loaded."""


@dataclass(frozen=True, slots=True, eq=False)
class AttachedAdapter:
    """An adapter that is attached to the base model; its weights are float32.

    Attributes:
        name: identifies the adapter among those attached to the model.
        config: rank, alpha and base model.
        flat: all weights in one buffer.
        parameters: views of the buffer, A [rank, in] and B [out, rank], by their names in PEFT's file, in the model's order.
        layers: the same views as pairs (A, B), by the layer's name.
    """

    name: str
    config: AdapterConfig
    flat: nn.Parameter
    parameters: dict[str, nn.Parameter]
    layers: Mapping[str, tuple[nn.Parameter, nn.Parameter]]

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of a buffer of this adapter's size, as views, by the parameters' names."""
        pieces = torch.split_with_sizes(flat, [parameter.numel() for parameter in self.parameters.values()])
        return {
            name: piece.view(parameter.shape)
            for (name, parameter), piece in zip(self.parameters.items(), pieces, strict=True)
        }

    def pairs(self, flat: Tensor) -> list[Tensor]:
        """Return A and B of one layer after the other, as views of a buffer of this adapter's size."""
        return list(self.parts(flat).values())

    def collect_gradients(self) -> None:
        """Let backward passes add to one buffer, `flat.grad`, which begins at zero. Does nothing if the buffer exists."""
        if self.flat.grad is None:
            self.flat.grad = torch.zeros_like(self.flat)
            for name, part in self.parts(self.flat.grad).items():
                self.parameters[name].grad = part

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for parameter in (self.flat, *self.parameters.values()):
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Return copies of the weights in host memory, by PEFT's names."""
        return self.parts(self.flat.detach().to("cpu", copy=True))

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


def new_adapter(
    name: str, config: AdapterConfig, layers: Mapping[str, nn.Linear], device: torch.device
) -> AttachedAdapter:
    """Return an adapter of these layers, given by name, with all weights zero."""
    shapes = {}
    for layer, module in layers.items():
        shapes[tensor_name(layer, "A")] = (config.rank, module.in_features)
        shapes[tensor_name(layer, "B")] = (module.out_features, config.rank)
    sizes = [rows * columns for rows, columns in shapes.values()]
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    pieces = zip(shapes.items(), torch.split_with_sizes(flat, sizes), strict=True)
    parameters = {key: nn.Parameter(piece.view(shape)) for (key, shape), piece in pieces}
    matrices = {layer: (parameters[tensor_name(layer, "A")], parameters[tensor_name(layer, "B")]) for layer in layers}
    return AttachedAdapter(name, config, nn.Parameter(flat), parameters, matrices)


def initial_weights(parameters: Mapping[str, Tensor], seed: int, agent: str) -> dict[str, Tensor]:
    """Return the weights of version 0 by PEFT's names, as those of `parameters`: B zero, and A uniform in +-1/sqrt(in), as in PEFT.

    A depends only on the job's seed, the agent's name and the tensor's name.
    """
    weights = {}
    for name, parameter in parameters.items():
        weights[name] = torch.zeros(parameter.shape, dtype=torch.float32)
        if ".lora_A." in name:
            draw = torch.Generator().manual_seed(derive_seed(seed, agent, name))
            bound = 1.0 / math.sqrt(parameter.shape[1])
            weights[name].uniform_(-bound, bound, generator=draw)
    return weights
