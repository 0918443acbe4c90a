"""The batches of `bench trl_step`, and the results that both sides report.

Standard library only: TRL's environment imports it too.
"""

import ctypes
import gc
import json
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANK, ALPHA, LEARNING_RATE, CLIP_LOW, CLIP_HIGH = 16, 32, 3e-4, 0.2, 0.28
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Shape:
    """Groups and completions of a batch; lengths in tokens, drawn from a range.

    budget: our microbatchTokens. per_device: TRL's batch sizes.
    """

    groups: int
    members: int
    prompt: tuple[int, int]
    reply: tuple[int, int]
    budget: int
    per_device: tuple[int, ...]


SHAPES = {
    "short": Shape(8, 8, (45, 55), (24, 64), 1024, (4, 8)),
    "long reply": Shape(1, 2, (48, 48), (2000, 2000), 2048, (1,)),
    "one long reply": Shape(1, 1, (48, 48), (2000, 2000), 2048, (1,)),
    "long prompt": Shape(1, 2, (1024, 1024), (1024, 1024), 4096, (1,)),
}


@dataclass(frozen=True, slots=True)
class Group:
    """Token ids of one prompt and its completions, with their advantages."""

    prompt: list[int]
    replies: list[list[int]]
    advantages: list[float]


def batch(shape: Shape, vocab_size: int = 49152) -> list[Group]:
    """Return the same random tokens at every call. Speed does not depend on the choice of tokens."""
    draw = random.Random(0)

    def tokens(length: tuple[int, int]) -> list[int]:
        return [draw.randrange(3, vocab_size) for _ in range(draw.randint(*length))]

    return [
        Group(
            tokens(shape.prompt),
            [tokens(shape.reply) for _ in range(shape.members)],
            [draw.gauss(0, 1) for _ in range(shape.members)],
        )
        for _ in range(shape.groups)
    ]


def num_tokens(groups: list[Group]) -> int:
    """Return the number of tokens of all sequences without padding; the speeds of both sides use it."""
    return sum(len(group.prompt) + len(reply) for group in groups for reply in group.replies)


def answer(step: Callable[[], None]) -> None:
    """Take one step per line on stdin and report its cost; first report the resident memory of the loaded process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _forget_peak()
    _say(resident=_status("VmRSS"))
    for _ in sys.stdin:
        began, spent = time.perf_counter(), time.process_time()
        step()
        took, cost = time.perf_counter() - began, time.process_time() - spent
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _say(wall_s=took, cpu_s=cost, peak=_status("VmHWM"), max_rss=peak)


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _status(name: str) -> int:
    """Return a value of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def _forget_peak() -> None:
    """Reset VmHWM, because loading a model may need more memory than training it."""
    Path("/proc/self/clear_refs").write_text("5")
