"""The trainer alone against plain PEFT and a plain loss: tokens/s and peak memory; switching agents; seconds of a commit.

Both sides compute the same batch, one after the other in one process, and take the clipped policy gradient of the
later half of each row. No vllm is needed.
"""

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu import shapes
from bench.gpu.operations import PLANS
from marlaas_worker.adapters import tensor_digests, write_adapter
from marlaas_worker.trainer.batching import MicroBatch
from marlaas_worker.trainer.compute import deterministic
from marlaas_worker.trainer.lora import AttachedAdapter, initial_weights
from marlaas_worker.trainer.memory import Recomputed
from marlaas_worker.trainer.model import BaseModel


def main(words: Sequence[str] = ()) -> None:
    parser = shapes.options("trainer", __doc__)
    parser.add_argument("--batches", default="64x256,8x2048,2x8192", help="rows x tokens of the batches")
    parser.add_argument("--agents", default="2,16,64", help="numbers of agents between which a trainer switches")
    chosen = parser.parse_args(words)
    folder = shapes.folder_of(chosen)
    columns = ("shape", "device", "dtype", "batch", "side", "tokens/s", "peak GiB", "against plain")
    shapes.show(columns, _speeds(chosen, folder))
    base = shapes.base_model(chosen, folder)
    counts = [int(count) for count in chosen.agents.split(",")]
    shapes.show(("shape", "agents", "ms to switch"), _switches(chosen, base, counts))
    shapes.show(("shape", "rank", "adapter MiB", "copy s", "serialise s", "hash s", "digests s", "write s"), [_commit(chosen, base)])  # fmt: skip


def _speeds(chosen: argparse.Namespace, folder: Path) -> Iterator[Sequence[Any]]:
    for batch in chosen.batches.split(","):
        rows, width = (int(number) for number in batch.split("x"))
        plain = 0.0
        for side, make in SIDES.items():
            rate, peak = _rate(chosen, folder, (rows, width), make)
            plain = plain or rate or 0.0
            against = f"{rate / plain:.2f}" if rate and plain else "-"
            yield chosen.shape, chosen.device, chosen.dtype, batch, side, f"{rate:.0f}" if rate else "out of memory", peak, against  # fmt: skip


def _rate(
    chosen: argparse.Namespace, folder: Path, size: tuple[int, int], make: Callable[..., Callable[[MicroBatch], None]]
) -> tuple[float | None, str]:
    shapes.release(chosen.device)
    step = make(folder, chosen)
    batch = shapes.random_rows(shapes.SHAPES[chosen.shape][0], *size)
    try:
        rate = batch.num_padded_tokens / shapes.seconds(lambda: step(batch), chosen.device, chosen.repeats)
    except Exception as error:
        if "memory" not in str(error):
            raise
        return None, shapes.peak_gib(chosen.device)
    return rate, shapes.peak_gib(chosen.device)


def _plain(folder: Path, chosen: argparse.Namespace) -> Callable[[MicroBatch], None]:
    """Return a step of the obvious implementation: unmodified PEFT, with logits of every position."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=shapes.RANK, lora_alpha=shapes.ALPHA, target_modules=shapes.TARGETS)
    model: Any = get_peft_model(shapes.plain_model(chosen, folder), config).eval()
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-4)

    def step(batch: MicroBatch) -> None:
        ids = torch.from_numpy(batch.ids).to(chosen.device)
        logits = model(input_ids=ids).logits.float()
        logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        places = torch.from_numpy(batch.before).to(chosen.device)
        row, column = places // ids.shape[1], places % ids.shape[1]
        _loss(logprobs[row, column], batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ours(
    folder: Path, chosen: argparse.Namespace, activation_bytes: int | None = None, plan: Recomputed | None = None
) -> Callable[[MicroBatch], None]:
    base = shapes.base_model(chosen, folder, activation_bytes)
    adapter = _attach(base, 0)
    optimizer = torch.optim.AdamW(adapter.parameters.values(), lr=1e-4)

    def step(batch: MicroBatch) -> None:
        with base._recompute.always(plan):
            base.backward(_loss(base.logprobs(adapter, batch, 1.0), batch), batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _recomputed(folder: Path, chosen: argparse.Namespace) -> Callable[[MicroBatch], None]:
    return _ours(folder, chosen, activation_bytes=0)


def _mlps_recomputed(folder: Path, chosen: argparse.Namespace) -> Callable[[MicroBatch], None]:
    return _ours(folder, chosen, plan=PLANS["MLPs"])


def _deterministic(folder: Path, chosen: argparse.Namespace) -> Callable[[MicroBatch], None]:
    step = _ours(folder, chosen)

    def alike(batch: MicroBatch) -> None:
        with deterministic(True):
            step(batch)

    return alike


SIDES = {
    "plain PEFT": _plain,
    "ours": _ours,
    "ours, deterministic": _deterministic,
    "ours, MLPs recomputed": _mlps_recomputed,
    "ours, layers recomputed": _recomputed,
}


def _loss(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    ratio = (logprobs - torch.from_numpy(batch.behaviour).to(logprobs)).exp()
    advantages = torch.from_numpy(batch.advantages).to(logprobs)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages).sum()


def _attach(base: BaseModel, number: int) -> AttachedAdapter:
    adapter = base.attach(shapes.RANK, shapes.ALPHA, ())
    adapter.load(initial_weights(adapter.parameters, number, "policy"))
    return adapter


def _switches(chosen: argparse.Namespace, base: BaseModel, counts: Sequence[int]) -> Iterator[Sequence[Any]]:
    """Measure a small forward pass with another adapter each time, minus one with the same adapter."""
    batch = shapes.random_rows(base.vocab_size, 1, 16)
    adapters: list[AttachedAdapter] = []
    for count in counts:
        adapters += [_attach(base, number) for number in range(len(adapters), count)]

        def turn(used: Sequence[AttachedAdapter]) -> None:
            with torch.no_grad():
                for adapter in used:
                    base.logprobs(adapter, batch, 1.0)

        others, same = (
            shapes.seconds(lambda used=used: turn(used), chosen.device, chosen.repeats)  # type: ignore[misc]
            for used in (adapters, adapters[:1] * count)
        )
        yield chosen.shape, count, f"{1000 * (others - same) / count:.2f}"


def _commit(chosen: argparse.Namespace, base: BaseModel) -> Sequence[Any]:
    """Measure publishing a version on this machine, without the bus and the blob store's network."""
    adapter = _attach(base, 0)
    marks = [time.perf_counter()]
    tensors = adapter.tensors()
    marks.append(time.perf_counter())
    files = write_adapter(tensors, adapter.config)
    marks.append(time.perf_counter())
    for data in files.values():
        hashlib.sha256(data).hexdigest()
    marks.append(time.perf_counter())
    tensor_digests(tensors, adapter.config.scaling)
    marks.append(time.perf_counter())
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
    marks.append(time.perf_counter())
    size = sum(map(len, files.values())) / 2**20
    taken = [f"{end - begin:.3f}" for begin, end in pairwise(marks)]
    return chosen.shape, shapes.RANK, f"{size:.1f}", *taken
