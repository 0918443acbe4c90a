"""Runs a 16-bit base model in float32, one decoder layer at a time, to measure its rounding without a second model in memory.

A layer's weights are converted to float32 before it computes, and the 16-bit originals are restored afterwards.
Adapters are already float32.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK_TOKENS = 8192
"""Rows of the output head that are converted to float32 at once."""


@contextmanager
def in_float32(decoder: nn.Module) -> Iterator[None]:
    """Within the context, a forward pass of the decoder computes in float32."""
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
    """Return log softmax(hidden @ weight.T) at `tokens` in float32; hidden [N, H], weight [V, H] of any dtype, tokens [N].

    The normaliser is summed over parts of the vocabulary, so that neither all logits nor a float32 copy of the head
    is in memory.
    """
    hidden = hidden.float()
    total = hidden.new_full((len(hidden),), -math.inf)
    for rows in torch.split(weight, _CHUNK_TOKENS):
        total = torch.logaddexp(total, torch.logsumexp(hidden @ rows.float().T, dim=-1))
    return (hidden * weight[tokens].float()).sum(-1) - total


def _parts(decoder: nn.Module) -> Iterator[nn.Module]:
    """Yield the embedding, each layer, and the final norm."""
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
