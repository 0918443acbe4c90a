"""LoRA of a linear layer on a CPU: `adapter_groups` beside vLLM's own operations, in turns, one thread, float32.

Decoding: one row a request. Prefilling: neighbouring rows of one adapter. Both compute the same; the largest difference is printed.
"""

import random
import time
from collections.abc import Callable, Sequence

import torch
from vllm.lora.ops.torch_ops import bgmv_expand_slice, bgmv_shrink

from bench.runs import print_table
from marlaas_worker.rollout.adapter_groups import add_adapters, group_rows, stacked_adapters

SLOTS, SECONDS, SEED = 16, 0.5, 0
CASES: dict[str, tuple[Sequence[int], int, Sequence[int], int]] = {
    "tiny, 8 rows of 8 adapters": (range(8), 64, (64, 64, 64), 8),
    "tiny, 32 rows of 16 adapters": ([row % 16 for row in range(32)], 64, (64, 64, 64), 8),
    "SmolLM2 q, k, v: 32 rows of 4 adapters": ([row % 4 for row in range(32)], 576, (576, 192, 192), 16),
    "SmolLM2 gate, up: 32 rows of 4 adapters": ([row % 4 for row in range(32)], 576, (1536, 1536), 16),
    "SmolLM2 gate, up: prefill of 4 x 100 rows": ([row // 100 for row in range(400)], 576, (1536, 1536), 16),
}
"""Slot of each row, inputs, outputs of the packed parts, rank."""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    rows = [[name, *_measured(random.Random(SEED), *case)] for name, case in CASES.items()]
    print_table(["layer", "ours, ms", "vLLM's, ms", "ratio", "largest difference"], rows)


def _measured(
    chance: random.Random, slots: Sequence[int], num_in: int, widths: Sequence[int], rank: int
) -> tuple[str, str, str, str]:
    a = [torch.randn(SLOTS, 1, rank, num_in) / num_in**0.5 for _ in widths]
    b = [torch.randn(SLOTS, 1, width, rank) for width in widths]
    places = chance.sample(range(SLOTS), SLOTS)
    indices = torch.tensor([places[slot] for slot in slots])
    inputs = torch.randn(len(slots), num_in)
    ours, theirs = torch.zeros(len(slots), sum(widths)), torch.zeros(len(slots), sum(widths))
    stacked = stacked_adapters([part.clone() for part in a], [part.clone() for part in b])

    def own() -> None:
        add_adapters(ours, inputs, group_rows(indices), stacked)

    def vllm() -> None:
        first = 0
        for a_part, b_part in zip(a, b, strict=True):
            hidden = torch.zeros(len(slots), rank)
            bgmv_shrink(inputs, a_part, hidden, indices, 1.0)
            bgmv_expand_slice(hidden, b_part, theirs, indices, first, b_part.shape[2], add_inputs=True)
            first += b_part.shape[2]

    own()
    vllm()
    apart = float((ours - theirs).abs().max())
    ms = [_best_ms(own), _best_ms(vllm)]
    return f"{ms[0]:.2f}", f"{ms[1]:.2f}", f"{ms[1] / ms[0]:.0f}x", f"{apart:.1e}"


def _best_ms(work: Callable[[], None]) -> float:
    best, until = float("inf"), time.perf_counter() + SECONDS
    while (began := time.perf_counter()) < until:
        work()
        best = min(best, time.perf_counter() - began)
    return 1e3 * best


if __name__ == "__main__":
    main()
