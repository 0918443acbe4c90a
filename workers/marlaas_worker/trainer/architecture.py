"""Properties of a base model's architecture on which the trainer depends, tested on the loaded model instead of looked up by name.

Every question here has an answer in bits, not within a tolerance, so it is the same in float32 and in bfloat16.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from marlaas_api.errors import Permanent
from marlaas_worker.trainer.batching import MicroBatch, collate
from marlaas_worker.trainer.rows import Segment, chain, pack_prefix_tree

log = logging.getLogger(__name__)


class ModelUnusable(Permanent):
    """The base model cannot be loaded, or computes something that the trainer cannot reproduce."""


def linear_layers(decoder: nn.Module) -> tuple[str, ...]:
    """Names of the decoder's linear layers (`q_proj`)."""
    linear = (name for name, module in decoder.named_modules() if isinstance(module, nn.Linear))
    return tuple(sorted({name.rsplit(".", 1)[-1] for name in linear}))


def example(ids: Sequence[int]) -> Segment:
    """A segment of these tokens; all but the first are predicted."""
    generated = np.arange(len(ids)) > 0
    return Segment(np.array(ids, np.int32), generated, np.zeros(len(ids), np.float32), 0, 0.0)


@torch.no_grad()
def check_head(model: Any, name: str) -> None:
    """Raise ModelUnusable unless logits are the head's product with the decoder's output: some architectures scale or cap before or after it."""
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


def shares_beginnings(config: Any, logprobs: Callable[[MicroBatch], Tensor]) -> bool:
    """Whether the model computes a row that is a tree of tokens (`rows.pack_prefix_tree`); it may take no mask of ours, or take it for something else."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(text, "use_sliding_window", getattr(text, "sliding_window", None)):
        return False
    try:
        return _computes_trees(logprobs, text.vocab_size)
    except (RuntimeError, TypeError, ValueError) as error:
        log.info("%s shares no beginnings: %s", type(config).__name__, error)
        return False


def _computes_trees(logprobs: Callable[[MicroBatch], Tensor], vocab_size: int) -> bool:
    """Compare one branch's logprobs in trees that differ in one thing.

    Other tokens in the branch beside it may change no bit; other depths must. And the branch must be nearer to itself in a row of its own than to
    itself where the whole row is its past.
    """
    ends = ((4, 5), (9, 10), (6, 7, 8))
    left, other, branch = ([number % vocab_size for number in (1, 2, 3, *end)] for end in ends)
    tree, beside = (
        collate(pack_prefix_tree([example(ids), example(branch)], 1 << 20, 1 << 20)) for ids in (left, other)
    )
    flat = replace(tree, depths=np.arange(tree.ids.size)[None])
    chained, alone = (collate([chain(example(ids))]) for ids in ([*left, *branch[3:]], branch))
    in_tree, in_other, at_other_depths, after_all, by_itself = (
        logprobs(batch)[-2:] for batch in (tree, beside, flat, chained, alone)
    )
    if not torch.equal(in_tree, in_other) or torch.equal(in_tree, at_other_depths):
        return False
    return bool((in_tree - by_itself).abs().max() < (after_all - by_itself).abs().max())
