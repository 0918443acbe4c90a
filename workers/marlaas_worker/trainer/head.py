"""Logprobs of single tokens out of hidden states, without ever holding the logits of all of them."""

from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 22
"""Logits held at once (16 MiB in float32, twice); still so many rows that the product is as fast as it gets."""


def token_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden @ weight.T / temperature) at `tokens`; hidden [N, H], weight [V, H] (frozen), tokens [N] to float32 [N].

    The derivative of a token's logprob by its hidden state, (onehot - softmax) @ weight / temperature, is taken chunk by chunk in the forward
    pass, while the logits are there: memory is [N, H] instead of [N, V], and nothing is computed twice.
    """
    result: Tensor = _TokenLogprobs.apply(hidden, weight, tokens, temperature)  # type: ignore[no-untyped-call]
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        rows = max(1, CHUNK_LOGITS // weight.shape[0])
        parts, slopes = [], [hidden.new_zeros((0, hidden.shape[1]))]
        for part, wished in zip(torch.split(hidden, rows), torch.split(tokens, rows), strict=True):
            scaled = _at_least_float32(part @ weight.T).div_(temperature)
            log_softmax = torch.log_softmax(scaled, dim=-1)
            parts.append(log_softmax.gather(1, wished[:, None]).squeeze(1))
            if wanted:
                slopes.append(_slope(log_softmax, wished, weight, temperature))
        ctx.save_for_backward(torch.cat(slopes) if wanted else None)
        return torch.cat(parts) if parts else _at_least_float32(hidden.new_zeros(0))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * upstream[0][:, None].to(slopes.dtype), None, None, None


def _slope(log_softmax: Tensor, tokens: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """d logprob / d hidden [n, H]; overwrites log_softmax [n, V]."""
    toward = log_softmax.exp_().neg_()
    toward[torch.arange(len(tokens), device=tokens.device), tokens] += 1.0
    return (toward.to(weight.dtype) @ weight) / temperature


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
