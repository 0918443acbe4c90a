"""Attention in rows that are trees of tokens: a token attends to itself and its ancestors.

For this, a micro-batch has numbers of each token, `enters` and `leaves` (`batching.TokenTrees`). Attention gets them in one of two forms:

- On a CPU, a mask with a number for each pair of a row's tokens. Its memory grows with the square of the row's length.
- On a CUDA GPU, FlexAttention (arXiv 2412.05496), which computes the mask from the numbers and skips blocks of pairs that are
  all masked. Its memory grows with the number of tokens. Its Triton kernels, which are the only ones used here, add in a fixed
  order: one program for each block of keys sums the gradients of keys and values, and one for each block of queries those of
  queries, without atomics. So deterministic jobs use it too.
"""

import itertools
import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from marlaas_worker.trainer.compute import deterministic

log = logging.getLogger(__name__)

BLOCK = 128
"""Tokens on each side of a block; the kernels' own blocks divide it. A smaller micro-batch gets a dense mask."""
_NAME = "sdpa_or_blocks"
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""By dtype, limit of the difference between attention by blocks and attention with a dense mask, as a part of the largest value.

From this difference on, the model keeps its dense mask.
"""


def dense_mask(enters: Tensor, leaves: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [B, 1, T, T] from the numbers of `TokenTrees` [B, T]: 0 where a token attends to another, -inf elsewhere."""
    sees = enters[:, None, :] <= enters[:, :, None]
    sees &= enters[:, :, None] < leaves[:, None, :]
    return torch.where(sees, torch.zeros((), dtype=dtype, device=enters.device), -math.inf)[:, None]


def block_mask(enters: Tensor, leaves: Tensor) -> BlockMask:
    """Return FlexAttention's mask of all rows of a micro-batch as one long row, from the numbers of `TokenTrees` [B, T].

    Pairs are compared a block of queries at a time, so memory grows with the number of tokens.
    """
    enters, leaves = enters.flatten(), leaves.flatten()
    length = len(enters)
    excess = -length % BLOCK  # tokens that nothing attends to, and that attend to nothing
    padded = nn.functional.pad(enters, (0, excess), value=-1)
    ends = nn.functional.pad(leaves, (0, excess), value=-1)
    some, every = [], []
    for queries in padded.view(-1, BLOCK, 1):
        sees = ((padded <= queries) & (queries < ends)).view(BLOCK, -1, BLOCK)
        some.append(sees.any(2).any(0))
        every.append(sees.all(2).all(0))
    full = torch.stack(every)
    partial = torch.stack(some) & ~full

    def sees_key(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (enters[key] <= enters[query]) & (enters[query] < leaves[key])

    blocks = (*_listed(partial), *_listed(full))
    return BlockMask.from_kv_blocks(*blocks, BLOCK, sees_key, (length, length))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return a relation of blocks in the form of `BlockMask.from_kv_blocks`.

    Args:
        blocks: bool [Q, K], whether a query block is related to a key block.

    Returns:
        For each query block the number of its related key blocks [1, 1, Q], and the indices of all key blocks, the related ones first
        [1, 1, Q, K].
    """
    counts = blocks.sum(1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None]


def attend_by_blocks(model: Any, device: torch.device) -> bool:
    """Let a model of transformers take a `block_mask` as its attention mask; without one it computes as before.

    Returns False, and leaves the model as it is, if its attention is of another kind, or a test of the kernels fails on this device.
    """
    if not model._supports_flex_attn or model.config.get_text_config()._attn_implementation != "sdpa":
        return False
    try:
        error = _error(model, device)
    except Exception as failed:  # of torch's compiler, of Triton, or of a C compiler that is missing
        log.warning("trees of tokens take a dense attention mask: FlexAttention failed: %s", failed)
        return False
    if not error < _TOLERANCE[model.dtype]:
        log.warning(
            "trees of tokens take a dense attention mask: FlexAttention differs by %.3g of the largest value", error
        )
        return False
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    return bool(model.config.get_text_config()._attn_implementation == _NAME)


def _error(model: Any, device: torch.device) -> float:
    """Return the largest difference of attention by blocks, and of its gradients, from attention with a dense mask, as a part of the largest value.

    The inputs are random, in the model's dtype and with its numbers and sizes of heads; a row is a tree with two branches. One row and two
    rows are computed, each by the fastest kernels and by deterministic ones: all that training compiles. NaN if a result contains NaN.
    """
    config, length = model.config.get_text_config(), 3 * BLOCK - 7
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_size = getattr(config, "qk_head_dim", None) or size
    value_size = getattr(config, "v_head_dim", None) or size
    module: Any = nn.Module()
    module.num_key_value_groups = heads // key_heads
    errors = []
    for num_rows, is_deterministic in itertools.product((1, 2), (False, True)):
        enters = torch.arange(num_rows * length, dtype=torch.int32, device=device).view(num_rows, length)
        leaves = (enters[:, :1] + length).repeat(1, length)
        leaves[:, BLOCK : 2 * BLOCK] = enters[:, :1] + 2 * BLOCK
        draw = torch.Generator().manual_seed(0)
        shapes = ((heads, length, key_size), (key_heads, length, key_size), (key_heads, length, value_size))
        *inputs, upstream = (
            torch.randn((num_rows, *shape), generator=draw).to(device, model.dtype)
            for shape in (*shapes, (length, heads, value_size))
        )
        outcomes = []
        for mask in (block_mask(enters, leaves), dense_mask(enters, leaves, model.dtype)):
            query, key, value = (one.requires_grad_() for one in inputs)
            with deterministic(is_deterministic):
                result, _ = _attention(module, query, key, value, mask, scaling=key_size**-0.5)
                outcomes.append((result.detach(), *torch.autograd.grad(result, (query, key, value), upstream)))
        errors += [(found - dense).abs().max() / dense.abs().max() for found, dense in zip(*outcomes, strict=True)]
    return float(torch.stack(errors).max())  # unlike Python's, this maximum is NaN if a number is


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention of query, key and value [B, heads, T, D] as [B, T, heads, D]; by blocks if the mask is a BlockMask."""
    if not isinstance(attention_mask, BlockMask):
        result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return result
    num_rows, heads, width, _ = query.shape
    inputs = [one.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for one in (query, key, value)]
    has_gradient = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
    flex: Any = _compiled() if query.device.type == "cuda" else flex_attention
    with torch.set_grad_enabled(has_gradient):
        if has_gradient:
            # Of all three, as the kernels compute it anyway: one compiled version for every choice of adapted layers.
            inputs = [one if one.requires_grad else one.detach().requires_grad_() for one in inputs]
        mixed: Tensor = flex(
            *inputs,
            block_mask=attention_mask,
            scale=kwargs.get("scaling"),
            enable_gqa=True,
            kernel_options={"BACKEND": "TRITON"},
        )
        return mixed.transpose(1, 2).reshape(num_rows, width, heads, -1).contiguous(), None


@cache
def _compiled() -> Callable[..., Any]:
    """Return FlexAttention, compiled for all lengths of rows.

    torch compiles versions with and without gradient, for one row and for several, and with and without `compute.deterministic`. More versions
    than the limit are an error, because the fallback would hold all pairs of tokens in memory.
    """
    # The limit of torch's settings would hold for this thread only; layers are recomputed in autograd's own.
    compiled: Any = torch.compile  # whose declared types lack the limit
    found: Callable[..., Any] = compiled(flex_attention, dynamic=True, fullgraph=True, recompile_limit=32)
    return found
