"""Tests of a base model's architecture for properties on which the trainer depends, on the loaded model instead of by name.

Every test compares values bit by bit or by order, without a tolerance, so its result is the same in float32 and in
bfloat16.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from marlaas_worker.base_model import ModelUnusable
from marlaas_worker.trainer.batching import MicroBatch, collate
from marlaas_worker.trainer.rows import Segment, chain, pack_prefix_tree

log = logging.getLogger(__name__)


def example(ids: Sequence[int]) -> Segment:
    """Return a segment of these tokens in which all but the first are predicted; behaviour logprobs and advantage are 0."""
    generated = np.arange(len(ids)) > 0
    return Segment(np.array(ids, np.int32), generated, np.zeros(len(ids), np.float32), 0, 0.0)


@torch.no_grad()
def check_head(model: Any, name: str) -> None:
    """Raise ModelUnusable unless the logits are the head's product, without bias, with the decoder's output.

    Some architectures scale or cap the hidden states before the head, or the logits after it.

    Args:
        model: a causal language model of transformers.
        name: name of the model in the error.
    """
    head, decoder = model.get_output_embeddings(), model.get_decoder()
    if getattr(head, "bias", None) is not None:
        raise ModelUnusable(f"{name}: a bias in the output head is not supported")
    ids = torch.arange(16, device=head.weight.device)[None] % head.weight.shape[0]
    around: list[Tensor] = []
    hook = head.register_forward_hook(lambda _, inputs, output: around.extend((inputs[0], output)))
    logits = model(input_ids=ids, use_cache=False).logits
    hook.remove()
    entered, left = around
    hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
    for place, seen, own in (("hidden states before", entered, hidden), ("logits after", left, logits)):
        if not torch.equal(seen.float(), own.float()):
            gap = float((own.float() - seen.float()).abs().max())
            raise ModelUnusable(
                f"{name}: {type(model).__name__} changes its {place} the output head "
                f"(by up to {gap:.3g}); the trainer does not support that"
            )


def shares_prefixes(config: Any, logprobs: Callable[[MicroBatch], Tensor]) -> bool:
    """Return whether the model computes rows that are trees of tokens (`rows.pack_prefix_tree`) correctly.

    A model may reject the attention mask of a tree, or interpret it differently.

    Args:
        config: the model's configuration in transformers.
        logprobs: the model's forward pass, which returns the logprobs [N] of a batch's generated tokens.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(text, "use_sliding_window", getattr(text, "sliding_window", None)):
        return False
    try:
        return _computes_trees(logprobs, text.vocab_size)
    except (RuntimeError, TypeError, ValueError) as error:
        log.info("%s cannot share prefixes: %s", type(config).__name__, error)
        return False


def _computes_trees(logprobs: Callable[[MicroBatch], Tensor], vocab_size: int) -> bool:
    """Return whether a branch's logprobs in a tree of two branches depend on the branch's tokens and depths only.

    All of these must hold:

    - Other tokens in the sibling branch change no bit of the logprobs.
    - Other depths change the logprobs.
    - The logprobs are close to those of the branch in a row of its own. "Close" means: closer than the logprobs of the branch's last
      tokens in a plain row, after the tokens of the sibling.
    """
    ends = ((4, 5), (9, 10), (6, 7, 8))
    left, other, branch = ([number % vocab_size for number in (1, 2, 3, *end)] for end in ends)
    tree, beside = (
        collate(pack_prefix_tree([example(ids), example(branch)], 1 << 20, 1 << 20)) for ids in (left, other)
    )
    depths = np.arange(tree.ids.size)[None]
    flat = replace(tree, trees=tree.trees and replace(tree.trees, depths=depths))
    chained, alone = (collate([chain(example(ids))]) for ids in ([*left, *branch[3:]], branch))
    in_tree, in_other, at_other_depths, after_all, by_itself = (
        logprobs(batch)[-2:] for batch in (tree, beside, flat, chained, alone)
    )
    if not torch.equal(in_tree, in_other) or torch.equal(in_tree, at_other_depths):
        return False
    return bool((in_tree - by_itself).abs().max() < (after_all - by_itself).abs().max())
