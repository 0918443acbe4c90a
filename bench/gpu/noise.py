"""Noise of 16-bit logprobs: the distance between two correct computations of one model, and the tokens and sequences clipped for it at staleness 0.

Compared with the trainer's own computation: the same model with another attention implementation, every row with
other padding, and float32 from the same weights. Rows are sampled from the model itself. With `--engine` also vLLM's
logprobs of its own samples (needs vllm). The clipped shares use a ratio whose denominator comes from the other
computation: GRPO's tokens outside [0.8, 1.28], GSPO's sequences outside 1 +- 3e-4 and 4e-4.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.gpu import shapes
from marlaas_worker.adapters import write_adapter
from marlaas_worker.trainer.batching import Segment, chain, collate
from marlaas_worker.trainer.lora import AttachedAdapter
from marlaas_worker.trainer.model import BaseModel

GSPO_LOW, GSPO_HIGH = 3e-4, 4e-4


def main(arguments: Sequence[str] = ()) -> None:
    parser = shapes.options("noise", __doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a random prompt")
    parser.add_argument("--reply", type=int, default=128, help="tokens that are sampled")
    parser.add_argument("--engine", action="store_true", help="compare with vLLM too")
    chosen = parser.parse_args(arguments)
    folder = shapes.random_model(chosen) if chosen.engine else shapes.folder_of(chosen)
    chosen.model = folder if chosen.engine else chosen.model
    columns = (
        "shape",
        "device",
        "dtype",
        "against",
        "mean abs difference",
        "99 %",
        "most",
        "GRPO clipped",
        "GSPO clipped",
    )
    shapes.show(columns, _rows(chosen, folder))


def _rows(chosen: argparse.Namespace, folder: Path) -> Iterator[Sequence[Any]]:
    base = shapes.base_model(chosen, folder)
    adapter = _attach(base)
    segments = _sample(base, adapter, chosen)
    own = _logprobs(base, adapter, segments, 8)
    for name, other in _others(base, adapter, segments, folder, chosen).items():
        yield chosen.shape, chosen.device, chosen.dtype, name, *_figures(own - other())
    if chosen.engine:
        sampled, found = asyncio.run(_engine(folder, chosen, adapter))
        yield chosen.shape, chosen.device, chosen.dtype, "vLLM", *_figures(_logprobs(base, adapter, sampled, 8) - found)


def _others(
    base: BaseModel, adapter: AttachedAdapter, segments: list[Segment], folder: Path, chosen: argparse.Namespace
) -> dict[str, Callable[[], Tensor]]:
    def eager() -> Tensor:
        base._model.config._attn_implementation = "eager"
        try:
            return _logprobs(base, adapter, segments, 8)
        finally:
            base._model.config._attn_implementation = "sdpa"

    def single() -> Tensor:
        wide = shapes.base_model(chosen, folder, dtype=torch.float32)
        return _logprobs(wide, _attach(wide), segments, 8)

    return {
        "eager attention": eager,
        "one row at a time": lambda: _logprobs(base, adapter, segments, 1),
        "float32": single,
    }


def _figures(difference: Tensor) -> tuple[str, ...]:
    """Return statistics of the logprob differences [rows, tokens]."""
    size = difference.abs().flatten()
    ratio, sequence = difference.exp(), difference.mean(1).exp()
    grpo = ((ratio < 0.8) | (ratio > 1.28)).float().mean()
    gspo = ((sequence < 1 - GSPO_LOW) | (sequence > 1 + GSPO_HIGH)).float().mean()
    most = size.sort().values[int(0.99 * (len(size) - 1))]
    return f"{size.mean():.2e}", f"{most:.2e}", f"{size.max():.2e}", f"{100 * grpo:.2f} %", f"{100 * gspo:.1f} %"


def _attach(base: BaseModel) -> AttachedAdapter:
    """Attach an adapter as large as after a few hundred training steps."""
    adapter = base.attach(shapes.RANK, shapes.ALPHA, ())
    draw = torch.Generator().manual_seed(1)
    weights = {}
    for name, value in adapter.parameters.items():
        spread = 1 / value.shape[1] ** 0.5 if ".lora_A." in name else 0.004
        weights[name] = spread * torch.randn(value.shape, generator=draw)
    adapter.load(weights)
    return adapter


@torch.no_grad()
def _logprobs(base: BaseModel, adapter: AttachedAdapter, segments: list[Segment], at_once: int) -> Tensor:
    parts = [segments[at : at + at_once] for at in range(0, len(segments), at_once)]
    found = [base.logprobs(adapter, collate([chain(one) for one in part]), 1.0) for part in parts]
    return torch.cat(found).view(len(segments), -1).cpu()


@torch.no_grad()
def _sample(base: BaseModel, adapter: AttachedAdapter, chosen: argparse.Namespace) -> list[Segment]:
    base._activate(adapter)
    draw = np.random.default_rng(0)
    prompts = torch.from_numpy(draw.integers(0, base.vocab_size, (chosen.rows, chosen.prompt))).to(base.device)
    torch.manual_seed(0)
    ids = base._model.generate(
        input_ids=prompts, do_sample=True, top_k=0, min_new_tokens=chosen.reply, max_new_tokens=chosen.reply, pad_token_id=0,
        attention_mask=torch.ones_like(prompts),
    )  # fmt: skip
    return [_segment(row, chosen.prompt) for row in ids.cpu().numpy().astype(np.int32)]


def _segment(ids: npt.NDArray[np.int32], prompt: int) -> Segment:
    return Segment(ids, np.arange(len(ids)) >= prompt, np.zeros(len(ids), np.float32), 0, 1.0)


async def _engine(folder: Path, chosen: argparse.Namespace, adapter: AttachedAdapter) -> tuple[list[Segment], Tensor]:
    """Return vLLM's samples with the adapter, and their logprobs."""
    from bench.gpu.engine import started
    from marlaas_worker.rollout.engine import LoadedAdapter, Sampling

    draw = np.random.default_rng(0)
    prompts = draw.integers(0, shapes.SHAPES[chosen.shape][0], (chosen.rows, chosen.prompt)).astype(np.int32)
    with tempfile.TemporaryDirectory() as scratch:
        loaded = LoadedAdapter("noise", 1, Path(scratch))
        for name, data in write_adapter(adapter.tensors(), adapter.config).items():
            (loaded.folder / name).write_bytes(data)
        async with started(folder, chosen, slots=1) as engine:
            await engine.load(loaded)
            calls = (
                engine.generate(f"n{at}", loaded, ids, Sampling(1.0, chosen.reply, at))
                for at, ids in enumerate(prompts)
            )
            made = await asyncio.gather(*calls)
    ids = [np.concatenate([prompt, one.output_ids]).astype(np.int32) for prompt, one in zip(prompts, made, strict=True)]
    return [_segment(row, chosen.prompt) for row in ids], torch.tensor([one.logprobs for one in made])
