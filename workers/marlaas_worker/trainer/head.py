"""Logprobs and entropies of tokens from hidden states, without holding the logits of all tokens in memory; also in float32, for calibration.

A 16-bit base model runs in float32 one decoder layer at a time, to measure its rounding without a second model in
memory. A layer's weights are converted to float32 before it computes, and the 16-bit originals are restored
afterwards. Adapters are already float32.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from marlaas_worker.trainer.lora import HALF, working_dtype

CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Bytes of float32 logits in a chunk, by device; the peak while computing a chunk is up to three times as much."""
LEAST_ROWS = 64
"""Fewest rows of a chunk, even for a large vocabulary: with fewer, reading the head's weights takes longer than multiplying by them."""


def token_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return log softmax(hidden @ weight.T / temperature) at `tokens`, float32 [N].

    hidden [N, H], weight [V, H] (frozen), tokens [N]. Logits of a 16-bit model are rounded to its dtype before they
    are normalised in float32, as engines do.

    The forward pass also computes the derivative of each token's logprob by its hidden state, (onehot - softmax) @
    weight / temperature, chunk by chunk while the logits are in memory. So memory is [N, H] instead of [N, V], and
    nothing is computed twice.
    """
    result: Tensor = _TokenLogprobs.apply(hidden, weight, tokens, temperature, "nothing")[0]  # type: ignore[no-untyped-call]
    return result


def token_logprobs_and_ranks(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return `token_logprobs`, and for each token 1.0 if no other one is more probable, else 0.0, without gradient, float32 [N]."""
    logprobs, best = _TokenLogprobs.apply(hidden, weight, tokens, temperature, "best")  # type: ignore[no-untyped-call]
    return logprobs, best.detach()


def token_logprobs_and_entropies(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return `token_logprobs`, and the entropy of the whole softmax(hidden @ weight.T / temperature) in nats, float32 [N].

    The entropy's derivative by the hidden state, -(p (log p + entropy)) @ weight / temperature, is computed in the
    same pass, so memory is twice [N, H].
    """
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(hidden, weight, tokens, temperature, "entropy")  # type: ignore[no-untyped-call]
    return result


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Return the number of tokens (rows of a chunk) that go through the head at once."""
    return max(LEAST_ROWS, CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (4 * vocab_size))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913  # autograd passes them by position
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, beside: str
    ) -> tuple[Tensor, Tensor]:
        """Return `token_logprobs`, and a second result, which `beside` names.

        beside: `entropy`; `best`, 1.0 for a token if no other one is more probable, else 0.0; or `nothing`, an empty tensor.
        """
        with_entropy = beside == "entropy"
        wanted = ctx.needs_input_grad[0]
        rows = chunk_rows(weight.shape[0], weight.device)
        working = weight.to(working_dtype(weight))
        nothing = _at_least_float32(hidden.new_zeros(0))
        parts, entropies = [nothing], [nothing]
        slopes = [hidden.new_zeros((0, hidden.shape[1]))]
        entropy_slopes = [hidden.new_zeros((0, hidden.shape[1]))]
        for part, wished in zip(torch.split(hidden, rows), torch.split(tokens, rows), strict=True):
            scaled = _logits(part, working).div_(temperature)
            log_softmax = torch.log_softmax(scaled, dim=-1)
            parts.append(log_softmax.gather(1, wished[:, None]).squeeze(1))
            if beside == "best":
                entropies.append((parts[-1] >= log_softmax.amax(-1)).to(parts[-1].dtype))
            if with_entropy:
                entropies.append(_entropy(log_softmax))
                if wanted:
                    entropy_slope = _entropy_slope(log_softmax, entropies[-1], working, temperature)
                    entropy_slopes.append(entropy_slope.to(hidden.dtype))
            if wanted:
                slopes.append(_slope(log_softmax, wished, working, temperature).to(hidden.dtype))
        ctx.with_entropy = with_entropy
        ctx.save_for_backward(*((torch.cat(slopes), torch.cat(entropy_slopes)) if wanted else (None, None)))
        return torch.cat(parts), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        slopes, entropy_slopes = ctx.saved_tensors
        total = slopes * upstream[0][:, None]
        if ctx.with_entropy:
            total += entropy_slopes * upstream[1][:, None]
        return total.to(slopes.dtype), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits [n, V], rounded to the dtype of hidden, in float32 or wider. weight: in the dtype in which to multiply (`working_dtype`)."""
    product = hidden.to(weight.dtype) @ weight.T
    return _at_least_float32(product if weight.dtype == hidden.dtype else product.to(hidden.dtype))


def _entropy(log_softmax: Tensor) -> Tensor:
    return -(log_softmax.exp() * log_softmax).sum(-1)


def _entropy_slope(log_softmax: Tensor, entropy: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return d entropy / d hidden [n, H]."""
    toward = -log_softmax.exp() * (log_softmax + entropy[:, None])
    return (toward.to(weight.dtype) @ weight) / temperature


def _slope(log_softmax: Tensor, tokens: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """Return d logprob / d hidden [n, H]; overwrites log_softmax [n, V]."""
    toward = log_softmax.exp_().neg_()
    toward[torch.arange(len(tokens), device=tokens.device), tokens] += 1.0
    return (toward.to(weight.dtype) @ weight) / temperature


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.dtype in HALF else values


_CHUNK_TOKENS = 8192
"""Rows of the output head that are converted to float32 at once."""


@contextmanager
def in_float32(decoder: nn.Module) -> Iterator[None]:
    """Within the context, a forward pass of the decoder computes in float32."""
    handles = []
    for part in _parts(decoder):
        if isinstance(part, nn.Embedding):
            handles.append(part.register_forward_hook(lambda _, __, output: output.float()))
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
