"""A group's replies as a tree that shares their prompt: attention by blocks against the dense mask, and against rows without sharing.

Each side takes the same forward and backward passes by deterministic kernels, and says whether a second one has the same bits. Blocks
need a CUDA GPU. A tree has one prompt and eight replies, of which each is half as long as the prompt.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bench.gpu import shapes
from marlaas_worker.trainer.batching import MicroBatch, Segment, chain, collate, pack_prefix_tree
from marlaas_worker.trainer.compute import deterministic
from marlaas_worker.trainer.lora import AttachedAdapter, initial_weights
from marlaas_worker.trainer.model import BaseModel

REPLIES = 8


def main(words: Sequence[str] = ()) -> None:
    parser = shapes.options("trees", __doc__)
    parser.add_argument("--tokens", default="2260,8192", help="about the number of tokens of a tree")
    chosen = parser.parse_args(words)
    columns = ("shape", "tree", "side", "tokens computed", "ms", "peak GiB", "same bits twice")
    shapes.show(columns, _rows(chosen))


def _rows(chosen: argparse.Namespace) -> Iterator[Sequence[Any]]:
    base = shapes.base_model(chosen, shapes.folder_of(chosen))
    adapter = base.attach(shapes.RANK, shapes.ALPHA, ())
    adapter.load(initial_weights(adapter.parameters, 0, "policy"))
    can_block = base._by_blocks
    for tokens in chosen.tokens.split(","):
        group = _group(base.vocab_size, int(tokens))
        tree = collate(pack_prefix_tree(group, 1 << 40, 1 << 40))
        sides = {"rows": (collate([chain(one) for one in group]), can_block), "dense mask": (tree, False)}
        if can_block:
            sides["blocks"] = tree, True
        for side, (batch, base._by_blocks) in sides.items():
            yield chosen.shape, tokens, side, batch.num_padded_tokens, *_measured(chosen, base, adapter, batch)


def _group(vocab_size: int, tokens: int) -> list[Segment]:
    draw = np.random.default_rng(0)
    reply = tokens // (REPLIES + 2)
    prompt = draw.integers(0, vocab_size, 2 * reply)
    generated = np.arange(3 * reply) >= 2 * reply
    ids = (np.concatenate([prompt, draw.integers(0, vocab_size, reply)]) for _ in range(REPLIES))
    return [Segment(one.astype(np.int32), generated, np.zeros(3 * reply, np.float32), 0, 1.0) for one in ids]


def _measured(
    chosen: argparse.Namespace, base: BaseModel, adapter: AttachedAdapter, batch: MicroBatch
) -> tuple[str, str, str]:
    def step() -> torch.Tensor:
        adapter.drop_gradients()
        adapter.collect_gradients()
        with deterministic(True):
            base.backward(base.logprobs(adapter, batch, 1.0).sum(), batch)
        assert adapter.flat.grad is not None
        return adapter.flat.grad.clone()

    shapes.release(chosen.device)
    try:
        taken_s = shapes.seconds(step, chosen.device, chosen.repeats)
        peak, is_same = shapes.peak_gib(chosen.device), torch.equal(step(), step())
    except Exception as error:
        if "memory" not in str(error):
            raise
        return "out of memory", shapes.peak_gib(chosen.device), "-"
    return f"{1000 * taken_s:.1f}", peak, "yes" if is_same else "no"
