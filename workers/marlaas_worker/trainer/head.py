"""Logprobs of single tokens out of hidden states, without ever holding the logits of all of them."""

from typing import Any

import torch
from torch import Tensor

from marlaas_worker.trainer.products import HALF, working_dtype

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Bytes of the float32 logits that are held at once, by device; while a chunk is computed, up to three times as much lives."""
LEAST_ROWS = 64
"""Rows of a chunk however large the vocabulary: with fewer, reading the head's weights takes longer than multiplying by them."""


def token_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden @ weight.T / temperature) at `tokens`; hidden [N, H], weight [V, H] (frozen), tokens [N] to float32 [N].

    Logits of a 16-bit model are rounded to its dtype before they are normalised in float32, as engines do.

    The derivative of a token's logprob by its hidden state, (onehot - softmax) @ weight / temperature, is taken chunk by chunk in the forward
    pass, while the logits are there: memory is [N, H] instead of [N, V], and nothing is computed twice.
    """
    result: Tensor = _TokenLogprobs.apply(hidden, weight, tokens, temperature)  # type: ignore[no-untyped-call]
    return result


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """How many tokens go through the head at once."""
    return max(LEAST_ROWS, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (4 * vocab_size))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        rows = chunk_rows(weight.shape[0], weight.device)
        working = weight.to(working_dtype(weight))
        parts, slopes = [], [hidden.new_zeros((0, hidden.shape[1]))]
        for part, wished in zip(torch.split(hidden, rows), torch.split(tokens, rows), strict=True):
            scaled = _logits(part, working).div_(temperature)
            log_softmax = torch.log_softmax(scaled, dim=-1)
            parts.append(log_softmax.gather(1, wished[:, None]).squeeze(1))
            if wanted:
                slopes.append(_slope(log_softmax, wished, working, temperature).to(hidden.dtype))
        ctx.save_for_backward(torch.cat(slopes) if wanted else None)
        return torch.cat(parts) if parts else _at_least_float32(hidden.new_zeros(0))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return (slopes * upstream[0][:, None]).to(slopes.dtype), None, None, None


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits [n, V] in float32 or more, rounded to the model's dtype; `weight` may be of the wider dtype in which it is multiplied."""
    product = hidden.to(weight.dtype) @ weight.T
    return _at_least_float32(product if weight.dtype == hidden.dtype else product.to(hidden.dtype))


def _slope(log_softmax: Tensor, tokens: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """d logprob / d hidden [n, H]; overwrites log_softmax [n, V]."""
    toward = log_softmax.exp_().neg_()
    toward[torch.arange(len(tokens), device=tokens.device), tokens] += 1.0
    return (toward.to(weight.dtype) @ weight) / temperature


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.dtype in HALF else values
