"""Layers computed twice: the same bits in less memory, and only where they would not fit."""

import numpy as np
import torch
from tests.trainer.test_model import attach, collate, gradients, segment
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from marlaas_worker.trainer.batching import MicroBatch
from marlaas_worker.trainer.batching import collate as collate_rows
from marlaas_worker.trainer.lora import AttachedAdapter
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.rows import Segment, pack_prefix_tree


def group() -> list[Segment]:
    """Four segments with one beginning."""
    made = []
    for seed in range(4):
        ids = np.concatenate([segment(9, 12, 0).ids, segment(seed, 0, 6 + seed).ids])
        made.append(Segment(ids, np.arange(len(ids)) >= 12, np.zeros(len(ids), np.float32), 0, 1.0))
    return made


def kept(base: BaseModel, adapter: AttachedAdapter, batch: MicroBatch) -> list[Tensor]:
    """What a forward pass keeps for its backward pass, weights aside."""
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        graph = base.logprobs(adapter, batch, 1.0)
    del graph
    return list(found.values())


def size(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def batches(base: BaseModel) -> list[MicroBatch]:
    return [
        collate([segment(1, 3, 40), segment(2, 6, 30)]),
        collate_rows(pack_prefix_tree(group(), base.pairs_per_token, 1000)),
    ]


def test_recomputed_layers_give_the_same_bits(tiny_model):
    often, never = BaseModel(str(tiny_model), activation_bytes=0), BaseModel(str(tiny_model))
    twice, once = attach(often, 1), attach(never, 1)
    for batch in batches(never):
        assert torch.equal(often.logprobs(twice, batch, 0.7), never.logprobs(once, batch, 0.7))
        expected = gradients(never, once, batch)
        assert all(torch.equal(value, expected[name]) for name, value in gradients(often, twice, batch).items())


def test_a_micro_batch_keeps_no_more_than_it_may_or_next_to_nothing(tiny_model):
    plain = BaseModel(str(tiny_model))
    adapter = attach(plain, 1)
    small, big = collate([segment(1, 3, 40)]), collate([segment(1, 3, 40), segment(2, 3, 40), segment(3, 3, 40)])
    limit = int(1.5 * small.num_padded_tokens * plain.activation_bytes_per_token)
    bounded = BaseModel(str(tiny_model), activation_bytes=limit)
    within = attach(bounded, 1)
    sizes = [size(kept(bounded, within, batch)) for batch in (small, big)]
    free = size(kept(plain, adapter, big))
    assert free > limit
    assert sizes[0] < limit
    assert sizes[1] < 0.3 * free


def test_what_a_token_takes_is_counted_and_attention_keeps_no_matrix_of_all_pairs_per_head(base):
    adapter = attach(base, 1)
    chains, trees = batches(base)
    for batch, pairs in ((chains, 0), (trees, trees.num_padded_tokens * trees.ids.shape[1])):
        found, width = kept(base, adapter, batch), batch.ids.shape[1]
        squares = [one for one in found if one.dim() >= 2 and tuple(one.shape[-2:]) == (width, width)]
        assert size(squares) == 4 * pairs  # one mask for all layers
        of_a_token = (size(found) - size(squares)) / batch.num_padded_tokens
        assert 0.8 * base.activation_bytes_per_token < of_a_token < 1.2 * base.activation_bytes_per_token
