"""RMSNorm, rotary embedding and SwiGLU that save less for the backward pass than autograd does, and launch fewer kernels in it.

The forward pass gives the same bits as transformers' own code. The backward pass computes the derivative of the whole function,
in float32 or wider, from the tensors below; it differs from autograd's by rounding, and adds in a fixed order.

| layer | saves | autograd saves besides |
|---|---|---|
| RMSNorm | its input, a scale per token | the input in float32 |
| rotary embedding | nothing of a token | nothing of a token |
| SwiGLU | the outputs of gate and up | their activation; and their product, as input of down |

A layer is replaced only where a test on random numbers gives the same bits (`replace_layers`), so other norms, activations and embeddings
stay as they are.
"""

import logging
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from marlaas_worker.trainer.lora import HALF, Made, remember

log = logging.getLogger(__name__)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return hidden [..., H] divided by its root mean square, rounded to its dtype, times weight [H] (frozen)."""
    result: Tensor = _Norm.apply(hidden, weight, epsilon)  # type: ignore[no-untyped-call]
    return result


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. A layer with an adapter that gets the result as input recomputes it in the backward pass instead of saving it."""
    result: Tensor = _Gated.apply(gate, up)  # type: ignore[no-untyped-call]
    return remember(result, Made(_gated, (gate, up)))


class Rotary:
    """The rotary embedding of queries and keys, as transformers' `apply_rotary_pos_emb`.

    All layers of a pass get the same sines, so their signed form is computed once per pass.
    """

    def __init__(self) -> None:
        self._sines: tuple[Tensor, Tensor] | None = None

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        """Return query and key [B, heads, T, D] rotated. cos and sin: [B, T, D]; the two halves of D are equal."""
        if self._sines is None or self._sines[0] is not sin:
            half = sin.shape[-1] // 2
            self._sines = sin, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        cos = cos.unsqueeze(unsqueeze_dim)
        signed = self._sines[1].unsqueeze(unsqueeze_dim)
        return tuple(_Turned.apply(one, cos, signed) for one in (query, key))  # type: ignore[no-untyped-call]


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in HALF else values


def _rounded_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left * right, computed in their dtype and rounded to `dtype`, without a tensor in between."""
    if left.dtype == dtype:
        return left * right
    return torch.mul(left, right, out=torch.empty_like(left, dtype=dtype))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = _wide(hidden)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(hidden, weight, scale)
        return weight * _rounded_product(wide, scale, hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of hidden: s (g - hidden s^2 mean(g hidden)), where s is the scale and g the upstream gradient times weight."""
        hidden, weight, scale = ctx.saved_tensors
        wide, slope = _wide(hidden), _wide(upstream[0] * weight)
        shared = (slope * wide).mean(-1, keepdim=True) * scale.square()
        return _rounded_product(torch.addcmul(slope, wide, shared, value=-1), scale, hidden.dtype), None, None


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        slope_gate = torch.ops.aten.silu_backward(upstream[0] * up, gate)
        return slope_gate, nn.functional.silu(gate).mul_(upstream[0])


def _swapped(values: Tensor) -> Tensor:
    half = values.shape[-1] // 2
    return torch.cat((values[..., half:], values[..., :half]), dim=-1)


class _Turned(torch.autograd.Function):
    """Rotation: x cos + swapped(x) signed, where swapped exchanges the halves of x, and signed is sin with its first half negated.

    The gradient of x is g cos + swapped(g signed), where g is the upstream gradient.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
        ctx.save_for_backward(cos, signed)
        return (values * cos).add_(_swapped(values) * signed)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        cos, signed = ctx.saved_tensors
        return (upstream[0] * cos).add_(_swapped(upstream[0] * signed)), None, None


@torch.no_grad()
def replace_layers(decoder: nn.Module) -> dict[str, int]:
    """Replace the forward passes of the decoder's norms, gated MLPs and rotary embeddings where a test gives the same bits.

    Each norm is tested, because its weights decide where rounding matters; of the other kinds, the first module of each class.

    Returns:
        The number of replaced modules by kind: `norm`, `gate`, `rotary`.
    """
    rotary = Rotary()
    found = dict.fromkeys(_KINDS, 0)
    passed: dict[tuple[type[nn.Module], str], bool] = {}
    for module in decoder.modules():
        for name, (is_candidate, test, replace) in _KINDS.items():
            if not is_candidate(module):
                continue
            key = type(module), name
            if name == "norm" or key not in passed:
                passed[key] = _passes(test, module)
            if passed[key]:
                replace(module, rotary)
                found[name] += 1
    log.info("layers that keep less for the backward pass: %s", found)
    return found


def _passes(test: Callable[[Any], bool], module: nn.Module) -> bool:
    try:
        return test(module)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        log.debug("%s stays as it is: %r", type(module).__name__, error)
        return False


def _random(like: Tensor, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(len(shape))
    return (3 * torch.randn(shape, generator=draw)).to(like)


def _is_norm(module: Any) -> bool:
    hidden = _random(module.weight, 5, *module.weight.shape)
    return torch.equal(module(hidden), rms_norm(hidden, module.weight, module.variance_epsilon))


def _is_gated(module: Any) -> bool:
    hidden = _random(module.gate_proj.weight, 5, module.gate_proj.in_features)
    return torch.equal(module(hidden), _gated_mlp(module, hidden))


def _turns(module: Any) -> bool:
    """Return whether the rotary function that the module's forward pass finds by its name gives the same bits as `Rotary`.

    The test has sines in the weights' dtype and in float32. A function that also accepts sines for a part of each head fails it.
    """
    like = next(module.parameters())
    theirs = type(module).forward.__globals__[_APPLY]
    own = Rotary()
    query, key = (_random(like, 1, heads, 5, 8) for heads in (3, 2))
    for dtype in {like.dtype, torch.float32}:
        cos = _random(like, 1, 5, 4).to(dtype).repeat(1, 1, 2)
        sin = cos.roll(1, dims=1)
        pairs = zip(theirs(query, key, cos, sin), own(query, key, cos, sin), strict=True)
        if not all(torch.equal(expected, found) for expected, found in pairs):
            return False
    try:
        theirs(query, key, cos[..., :4], sin[..., :4])
    except RuntimeError:
        return True
    return False


def _gated_mlp(module: Any, hidden: Tensor) -> Tensor:
    result: Tensor = module.down_proj(swiglu(module.gate_proj(hidden), module.up_proj(hidden)))
    return result


def _replace_norm(module: Any, _: Rotary) -> None:
    module.forward = lambda hidden: rms_norm(hidden, module.weight, module.variance_epsilon)


def _replace_gated(module: Any, _: Rotary) -> None:
    module.forward = lambda hidden: _gated_mlp(module, hidden)


def _replace_rotary(module: Any, rotary: Rotary) -> None:
    """Let this module's forward pass, and no other model's, call `rotary` instead of transformers' function."""
    old = type(module).forward
    names = old.__globals__ | {_APPLY: rotary}
    new = FunctionType(old.__code__, names, old.__name__, old.__defaults__, old.__closure__)
    new.__kwdefaults__ = old.__kwdefaults__
    module.forward = MethodType(new, module)


def _has_rotary(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and _APPLY in code.co_names and _APPLY in type(module).forward.__globals__


_APPLY = "apply_rotary_pos_emb"
_KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], bool], Callable[[Any, Rotary], None]]] = {
    "norm": (lambda module: hasattr(module, "variance_epsilon"), _is_norm, _replace_norm),
    "gate": (lambda module: hasattr(module, "gate_proj"), _is_gated, _replace_gated),
    "rotary": (_has_rotary, _turns, _replace_rotary),
}
