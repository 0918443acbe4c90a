"""Upper bound on the gain of fused multi-agent training: tokens/s of forward and backward by tokens per pass, with one adapter.

Where more tokens per pass are no faster, computing several agents' micro-batches in one pass gains nothing. No vllm
is needed.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import shapes
from marlaas_worker.trainer.lora import initial_weights

WIDTH = 256


def main(arguments: Sequence[str] = ()) -> None:
    parser = shapes.options("ceiling", __doc__)
    parser.add_argument("--tokens", default="32,64,128,256,512,1024,2048,4096,8192")
    chosen = parser.parse_args(arguments)
    counts = [int(count) for count in chosen.tokens.split(",")]
    columns = ("shape", "device", "dtype", "tokens", "tokens/s", "of the best", "peak GiB")
    shapes.show(columns, _rows(chosen, shapes.folder_of(chosen), counts))


def _rows(chosen: argparse.Namespace, folder: Path, counts: Sequence[int]) -> Iterator[Sequence[Any]]:
    base = shapes.base_model(chosen, folder)
    adapter = base.attach(shapes.RANK, shapes.ALPHA, ())
    adapter.load(initial_weights(adapter.parameters, 0, "policy"))
    found = []
    for count in counts:
        shapes.release(chosen.device)
        batch = shapes.random_rows(base.vocab_size, max(1, count // WIDTH), min(count, WIDTH))
        taken = shapes.seconds(
            lambda batch=batch: base.backward(base.logprobs(adapter, batch, 1.0).sum(), batch),  # type: ignore[misc]
            chosen.device,
            chosen.repeats,
        )
        found.append((count, count / taken, shapes.peak_gib(chosen.device)))
    best = max(rate for _, rate, _ in found)
    for count, rate, peak in found:
        yield chosen.shape, chosen.device, chosen.dtype, count, f"{rate:.0f}", f"{rate / best:.2f}", peak
