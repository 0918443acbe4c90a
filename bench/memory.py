"""Estimates of memory beside measured peaks, of trainer and engine, by component: `python -m bench memory`.

Each side is a process of its own that loads the model, does its work and reads its own highest resident memory (VmHWM, reset before each phase). The trainer
binds agents one after the other, trains micro-batches of several sizes and publishes a version; the engine fills its slots and its KV cache and scores probes.
A component's measure is the rise of the peak over what was resident before it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODELS = ("tiny", "smollm2")
DTYPES = ("float32", "bfloat16")
RANK, AGENTS = 16, 3
MIB = 2**20


def resident(name: str = "VmRSS") -> int:
    """Bytes of this process, by a name of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def reset_peak() -> int:
    """Let VmHWM begin anew; returns what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


def trainer(model: Path, dtype: str, tokens: Sequence[int]) -> dict[str, int]:
    """Peaks of a trainer's parts, in bytes."""
    import torch

    from bench.trainer import document, groups
    from marlaas_worker.adapters import DTYPES as TORCH_DTYPES
    from marlaas_worker.trainer.assignment import Assignment
    from marlaas_worker.trainer.commit import StepResult
    from marlaas_worker.trainer.learner import Learner
    from marlaas_worker.trainer.model import BaseModel
    from marlaas_worker.trainer.rows import chain
    from marlaas_worker.trainer.versions import contents_of

    torch.set_num_threads(1)
    found = {"process": resident()}
    base = BaseModel(str(model), dtype=TORCH_DTYPES[dtype], activation_bytes=1 << 40)
    found["weights, at most"], found["weights"] = resident("VmHWM") - found["process"], resident() - found["process"]
    job = document(4096)
    learners = []
    for number in range(AGENTS):
        before = reset_peak()
        learners.append(Learner(base, Assignment(job, job.spec.agents[0])))
        learners[-1].begin()
        rows = [chain(part) for group in groups(base.vocab_size, 8) for part in group][:1]
        learners[-1].accumulate(rows)
        learners[-1].step(0)
        found[f"agent {number}"] = resident() - before
    found["bytes per token"] = int(base.activation_bytes_per_token)
    for count in tokens:
        rows = _rows(base.vocab_size, count)
        before = reset_peak()
        learners[0].accumulate(rows)
        found[f"{count} tokens"] = resident("VmHWM") - before
    learners[0].step(1)
    before = reset_peak()
    contents_of(learners[0], Assignment(job, job.spec.agents[0]), base.vocab_size, StepResult(1, 1, (), {}, 0.0))
    found["publishing"] = resident("VmHWM") - before
    return found


def _rows(vocab_size: int, num_tokens: int) -> list[Any]:
    import numpy as np

    from marlaas_worker.trainer.rows import Segment, chain

    draw, width = np.random.default_rng(0), 256
    made = []
    for _ in range(num_tokens // width):
        ids = draw.integers(0, vocab_size, width).astype(np.int32)
        made.append(chain(Segment(ids, np.arange(width) >= width // 2, np.zeros(width, np.float32), 0, 1.0)))
    return made
