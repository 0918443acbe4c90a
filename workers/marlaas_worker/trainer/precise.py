"""A 16-bit base model computed in float32, one decoder layer at a time: what its rounding costs, without a second model in memory.

A layer's weights are widened before it computes and put back afterwards; 16 bits to float32 and back loses nothing. Adapters are
float32 already.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK_TOKENS = 8192
"""Rows of the output head that are widened at once."""


@contextmanager
def in_float32(decoder: nn.Module) -> Iterator[None]:
    """Within, a forward pass of the decoder computes in float32."""
    handles = []
    for part in _parts(decoder):
        if isinstance(part, nn.Embedding):
            handles.append(part.register_forward_hook(_widen_output))
        else:
            widen, narrow = _widening(part)
            handles.append(part.register_forward_pre_hook(widen))
            handles.append(part.register_forward_hook(narrow, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def precise_token_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(hidden @ weight.T) at `tokens` in float32; hidden [N, H], weight [V, H] of any dtype, tokens [N].

    The normaliser is summed part by part of the vocabulary, so that neither the logits nor the widened head are held whole.
    """
    hidden = hidden.float()
    total = hidden.new_full((len(hidden),), -math.inf)
    for rows in torch.split(weight, _CHUNK_TOKENS):
        total = torch.logaddexp(total, torch.logsumexp(hidden @ rows.float().T, dim=-1))
    return (hidden * weight[tokens].float()).sum(-1) - total


def _parts(decoder: nn.Module) -> Iterator[nn.Module]:
    """Embedding, every layer, final norm."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield child


def _widen_output(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output.float()


def _widening(part: nn.Module) -> tuple[Callable[..., None], Callable[..., None]]:
    kept: list[tuple[nn.Parameter, Tensor]] = []

    def widen(*_: Any) -> None:
        for parameter in part.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                kept.append((parameter, parameter.data))
                parameter.data = parameter.data.float()

    def narrow(*_: Any) -> None:
        while kept:
            parameter, data = kept.pop()
            parameter.data = data

    return widen, narrow
