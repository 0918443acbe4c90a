"""Attention in trees of tokens: blocks and the dense mask against each other, and against torch's own block masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.trainer.test_model import attach, gradients, segment
from torch.nn.attention import flex_attention as flex

from marlaas_worker.trainer import tree_attention
from marlaas_worker.trainer.batching import chain, collate
from marlaas_worker.trainer.compute import deterministic
from marlaas_worker.trainer.model import BaseModel
from marlaas_worker.trainer.tree_attention import attend_by_blocks, block_mask, dense_mask


def trees(*lengths):
    """Rows in which one token in twenty continues an earlier token than the one before it."""
    draw, rows = np.random.default_rng(0), []
    for length in lengths:
        parents, branches = np.arange(-1, length - 1, dtype=np.int32), np.flatnonzero(draw.random(length) < 0.05)
        parents[branches] = draw.integers(-1, branches)
        rows.append(replace(chain(segment(length, 3, length - 3)), parents=parents))
    return collate(rows)


@pytest.mark.parametrize("lengths", [(300,), (128, 256), (130, 7, 257)], ids=str)
def test_blocks_are_those_that_torch_finds_by_comparing_all_pairs(lengths):
    batch = trees(*lengths)
    numbers = torch.from_numpy(batch.trees.enters), torch.from_numpy(batch.trees.leaves)
    found, all_pairs = block_mask(*numbers), (1, 1, batch.ids.size, batch.ids.size, "cpu")
    expected = flex.create_block_mask(found.mask_mod, *all_pairs)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    rows = torch.isfinite(dense_mask(*numbers, torch.float32))[:, 0]
    assert torch.equal(flex.create_mask(found.mask_mod, *all_pairs)[0, 0], torch.block_diag(*rows).bool())


def test_logprobs_and_gradients_by_blocks_are_those_by_the_dense_mask(base, caplog, monkeypatch):
    adapter, batch = attach(base, 1, targets=("v_proj", "up_proj")), trees(300, 170)
    expected = base.logprobs(adapter, batch, 0.7), gradients(base, adapter, batch)
    assert not attend_by_blocks(base._model, base.device)
    assert "FlexAttention failed: FlexAttention does not support backward on CPU" in caplog.text
    assert torch.equal(base.logprobs(adapter, batch, 0.7), expected[0])
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # its formula without compiled kernels does
    assert attend_by_blocks(base._model, base.device)
    base._by_blocks = True
    assert torch.allclose(base.logprobs(adapter, batch, 0.7), expected[0], atol=1e-5)
    found = gradients(base, adapter, batch)
    for name, value in found.items():
        assert torch.allclose(value, expected[1][name], atol=1e-5 * float(value.abs().max())), name
    base.limit_activations(0)
    assert all(torch.equal(value, found[name]) for name, value in gradients(base, adapter, batch).items()), "recomputed"


def test_kernels_whose_gradients_are_no_numbers_are_not_taken(base, caplog, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(tree_attention, "flex_attention", with_gradients_without_numbers)
    assert not attend_by_blocks(base._model, base.device)
    assert "FlexAttention differs by nan" in caplog.text


def with_gradients_without_numbers(query, key, value, **settings):
    mixed = flex.flex_attention(query, key, value, **settings)
    mixed.register_hook(lambda gradient: gradient * float("nan"))
    return mixed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch finds none")
def test_on_a_gpu_16k_tokens_of_trees_have_the_same_bits_twice_by_blocks(tiny_model):
    base, batch = BaseModel(str(tiny_model), "cuda"), trees(8192, 8192)
    adapter = attach(base, 1)
    with deterministic(True):
        first, again = gradients(base, adapter, batch), gradients(base, adapter, batch)
        base.limit_activations(0)
        recomputed = gradients(base, adapter, batch)
    assert base._by_blocks
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert all(torch.equal(value, recomputed[name]) for name, value in first.items())
