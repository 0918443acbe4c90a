"""The batches of `bench trl_step`, and what both sides say of themselves. Standard library only: TRL's environment imports it too."""

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
    """So many groups of so many completions; lengths in tokens, drawn between two ends. budget: our microbatchTokens; per_device: TRL's batch sizes."""

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
    """The same random tokens wherever it is called. Speed does not depend on which tokens they are."""
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
    """Tokens of all sequences, padding not counted: what both sides are credited with."""
    return sum(len(group.prompt) + len(reply) for group in groups for reply in group.replies)


def answer(step: Callable[[], None]) -> None:
    """Take one step per line on stdin and say what it cost; first, what the loaded process holds."""
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
    """A figure of this process in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def _forget_peak() -> None:
    """VmHWM counts from here: loading a model may need more than training it."""
    Path("/proc/self/clear_refs").write_text("5")
