"""Estimates of memory against measured peaks, of trainer and engine, by component: `python -m bench memory`.

Each side is a process of its own that loads the model, does its work and reads its own highest resident memory
(VmHWM, reset before each phase). The trainer binds agents one after the other, trains a micro-batch and publishes a
version; the engine fills its slots and its KV cache and scores probes. A part's measured size is the peak minus the
memory resident before it, after the heap has returned its free memory.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import options
from bench.runs import table

if TYPE_CHECKING:
    from marlaas_api.kinds import ModelPoolSpec
    from marlaas_worker.trainer.learner import Learner
    from marlaas_worker.trainer.model import BaseModel

MODELS = ("tiny", "smollm2")
DTYPES = ("float32", "bfloat16")
RANK, AGENTS, SLOTS, WIDTH, KV_CACHE = 16, 3, 4, 256, "64Mi"
MIB = 2**20
SMALL = 64 * MIB
"""Parts smaller than this are within the rounding of allocator and pages; they count in the totals only."""


def resident(name: str = "VmRSS") -> int:
    """Return bytes of this process, by a name of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def trimmed() -> int:
    """Return the resident bytes after the heap has returned its free memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def peak_from_here() -> int:
    """Reset VmHWM; return the resident bytes."""
    held = trimmed()
    Path("/proc/self/clear_refs").write_text("5")
    return held


def trainer(model: Path, dtype: str, num_tokens: int) -> dict[str, int]:
    """Return the peaks of a trainer's parts in bytes, under the names that `estimate` uses.

    A tiny model is loaded first, so that memory that every process allocates once (PEFT's code, buffers of MKL)
    counts as the process.
    """
    import torch

    from bench.trainer import random_model
    from marlaas_worker.adapters import DTYPES as TORCH_DTYPES
    from marlaas_worker.trainer.model import BaseModel

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        random_model("tiny", Path(folder))
        _bound(BaseModel(folder, dtype=TORCH_DTYPES[dtype]), num_tokens).close()
    found = {"trainer: process": trimmed()}
    base = BaseModel(str(model), dtype=TORCH_DTYPES[dtype], activation_bytes=1 << 40)
    found["trainer: weights"] = trimmed() - found["trainer: process"]
    learners = [_bound(base, num_tokens)]
    buffers = trimmed() - found["trainer: process"] - found["trainer: weights"]
    before = trimmed()
    learners += [_bound(base, num_tokens) for _ in range(1, AGENTS)]
    found["trainer: an agent"] = (trimmed() - before) // (AGENTS - 1)
    found["trainer: process"] += buffers - found["trainer: an agent"]  # MKL's grow with the width of the layers
    found["trainer: bytes kept per token"] = int(base.activation_bytes_per_token)
    for learner in learners:
        learner.step(1, 1)
    found[f"trainer: {num_tokens} tokens"] = _pass_bytes(base, learners[0], num_tokens)
    found["trainer: publishing"] = _publishing_bytes(base, learners[0], model, dtype)
    passing = max(found[f"trainer: {num_tokens} tokens"], found["trainer: publishing"])
    found["trainer: all"] = found["trainer: process"] + found["trainer: weights"] + passing
    found["trainer: all"] += AGENTS * found["trainer: an agent"]
    return found


def _bound(base: "BaseModel", num_tokens: int) -> "Learner":
    """Return an agent in the middle of its second step, with weights, moments and gradients in memory."""
    from bench.trainer import document
    from marlaas_worker.trainer.assignment import Assignment
    from marlaas_worker.trainer.learner import Learner

    learner = Learner(base, Assignment(job := document(num_tokens), job.spec.agents[0]))
    learner.begin()
    for _ in range(2):
        learner.step(0, 1)
        learner.accumulate(_rows(base.vocab_size, WIDTH))
    return learner


def _pass_bytes(base: "BaseModel", learner: "Learner", num_tokens: int) -> int:
    """Return the peak of a forward and backward pass over a micro-batch, without the agent's gradients."""
    learner.accumulate(_rows(base.vocab_size, WIDTH))  # allocates the gradients
    before = peak_from_here()
    learner.accumulate(_rows(base.vocab_size, num_tokens))
    return resident("VmHWM") - before


def _publishing_bytes(base: "BaseModel", learner: "Learner", model: Path, dtype: str) -> int:
    """Return the peak of building a version's contents."""
    from marlaas_api.documents import pool_spec
    from marlaas_api.messages import PoolDocument
    from marlaas_worker.trainer.calibration import calibrate
    from marlaas_worker.trainer.versions import StepResult, contents_of, take_snapshot

    learner.step(2, 1)
    calibration = calibrate(base, PoolDocument(name="pool", model_path=str(model), spec=pool_spec(pool(model, dtype))))
    before = peak_from_here()
    result = StepResult(1, 1, (), {}, 0.0)
    contents_of(take_snapshot(learner, calibration, result), calibration, result)
    return resident("VmHWM") - before


def pool(model: Path, dtype: str) -> "ModelPoolSpec":
    """Return the measured pool."""
    from marlaas_api.kinds import ModelPoolSpec

    return ModelPoolSpec.model_validate(
        {"model": {"path": str(model)}, "maxRank": RANK, "adapterSlots": SLOTS, "trainer": {"activationBytes": "1Ti"},
         "rollout": {"dtype": dtype, "kvCacheBytes": KV_CACHE}}
    )  # fmt: skip


def _rows(vocab_size: int, num_tokens: int) -> list[Any]:
    import numpy as np

    from marlaas_worker.trainer.batching import Segment, chain

    draw, made = np.random.default_rng(0), []
    for _ in range(num_tokens // WIDTH):
        ids = draw.integers(0, vocab_size, WIDTH).astype(np.int32)
        made.append(chain(Segment(ids, np.arange(WIDTH) >= WIDTH // 2, np.zeros(WIDTH, np.float32), 0, 1.0)))
    return made


def estimate(model: Path, dtype: str, num_tokens: int) -> dict[str, int]:
    """Return the parts of `marlaas.models.memory`, under the same names."""
    from bench.trainer import manifest
    from marlaas.models import inspect
    from marlaas.models.memory import activation_bytes, demands, head_bytes
    from marlaas_api.documents import job_spec

    facts, job, spec = inspect(model), manifest(num_tokens), pool(model, dtype)
    engine, trains = demands(facts, spec, [job_spec(job)])
    parts = list(trains.parts.values())
    per_agent = 16 * facts.adapter_parameters(RANK)
    found = {
        "trainer: process": parts[3],
        "trainer: weights": parts[0],
        "trainer: an agent": per_agent,
        "trainer: publishing": parts[1] - per_agent + head_bytes(facts, spec, num_tokens),  # probes go through the head
        f"trainer: {num_tokens} tokens": parts[2],
        "trainer: bytes kept per token": activation_bytes(facts, spec, RANK, 1024) // 1024,
        "engine: all": engine.total,
    }
    found["trainer: all"] = trains.total + (AGENTS - 1) * per_agent
    return found


async def _engine(model: Path, dtype: str) -> int:
    """Return the highest memory of vLLM's processes with full slots and a full KV cache; shared memory is divided among them."""
    import numpy as np
    import psutil

    from bench.gpu.engine import write_adapter_of
    from marlaas_api.documents import pool_spec
    from marlaas_api.kinds import ModelPoolSpec
    from marlaas_worker.rollout.engine import LoadedAdapter, Sampling
    from marlaas_worker.rollout.vllm_engine import VllmEngine

    spec = ModelPoolSpec.model_validate(
        {"model": {"path": str(model)}, "maxRank": RANK, "adapterSlots": SLOTS,
         "rollout": {"dtype": dtype, "kvCacheBytes": KV_CACHE, "maxNumSeqs": 16, "maxModelLen": 512}}
    )  # fmt: skip
    engine = VllmEngine(model, pool_spec(spec), frozenset(), Path(tempfile.mkdtemp()))
    await engine.start()
    loaded = [LoadedAdapter(f"a{number}", number + 1, write_adapter_of(model, number)) for number in range(SLOTS)]
    for adapter in loaded:
        await engine.load(adapter)
    draw = np.random.default_rng(0)
    for number in range(16):
        ids = draw.integers(2, 90, 256).astype(np.int32)
        await engine.generate(f"r{number}", loaded[number % SLOTS], ids, Sampling(1.0, 2, number))
    await engine.score(loaded[0], draw.integers(2, 90, 24).astype(np.int32))
    held = sum(process.memory_full_info().pss for process in (psutil.Process(), *engine.processes))
    await engine.stop()
    return int(held)


def main(arguments: Sequence[str] = ()) -> None:
    parser = options("memory", __doc__)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: both")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--tokens", type=int, default=1024, help="of the trainer's micro-batch")
    parser.add_argument("--only", choices=("trainer", "engine"))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.side == "trainer":
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as `python -m marlaas_worker trainer` does
        print(json.dumps(trainer(chosen.folder, chosen.dtype[0], chosen.tokens)))
    elif chosen.side == "engine":
        print(json.dumps({"engine: all": asyncio.run(_engine(chosen.folder, chosen.dtype[0]))}))
    else:
        for name in chosen.model or MODELS:
            for dtype in chosen.dtype or DTYPES:
                print(compare(name, dtype, chosen.tokens, chosen.only), flush=True)


def compare(name: str, dtype: str, tokens: int, only: str | None) -> str:
    """Return a table of one model and dtype."""
    from bench.trainer import child, random_model

    with tempfile.TemporaryDirectory() as folder:
        random_model(name, Path(folder))
        measured: dict[str, int] = {}
        for side in ("trainer", "engine") if only is None else (only,):
            command = [sys.executable, "-m", "bench.memory", "--side", side, "--dtype", dtype, "--tokens", str(tokens)]
            measured |= child([*command, "--folder", folder])
        rows = [
            [
                name,
                dtype,
                part,
                f"{size / MIB:.1f}",
                f"{measured[part] / MIB:.1f}",
                f"{size / max(1, measured[part]):.2f}"
                if max(size, measured[part]) >= SMALL or "kept" in part
                else "small",
            ]
            for part, size in estimate(Path(folder), dtype, tokens).items()
            if part in measured
        ]
    return table(["model", "dtype", "part", "estimate, MiB", "measured, MiB", "estimate / measured"], rows)


if __name__ == "__main__":
    main(sys.argv[1:])
