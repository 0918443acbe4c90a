"""The engine: start, adapters loaded and read back, a version's proof and first token, and tokens/s with and without adapters.

Needs vllm.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu import shapes
from marlaas_worker.adapters import AdapterConfig, tensor_name, write_adapter


def main(arguments: Sequence[str] = ()) -> None:
    parser = shapes.options("engine", __doc__)
    parser.add_argument("--adapters", default="1,8,32", help="numbers of adapters that requests are spread over")
    parser.add_argument("--requests", default="8,64,256", help="numbers of requests at once")
    parser.add_argument("--reply", type=int, default=128, help="tokens of a reply")
    chosen = parser.parse_args(arguments)
    asyncio.run(_measure(chosen, shapes.random_model(chosen)))


@asynccontextmanager
async def started(folder: Path, chosen: argparse.Namespace, slots: int, requests: int = 64) -> AsyncIterator[Any]:
    """Start an engine of the chosen dtype."""
    from marlaas_api.documents import pool_spec
    from marlaas_api.kinds import ModelPoolSpec
    from marlaas_worker.rollout.vllm_engine import VllmEngine

    rollout = {
        "dtype": chosen.dtype,
        "maxNumSeqs": requests,
        "kvCacheBytes": "8Gi" if chosen.device == "cuda" else "64Mi",
    }
    spec = pool_spec(
        ModelPoolSpec.model_validate(
            {"model": {"path": str(folder)}, "adapterSlots": slots, "maxRank": shapes.RANK, "rollout": rollout}
        )
    )
    engine = VllmEngine(folder, spec, frozenset(), Path(tempfile.mkdtemp()))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def _measure(chosen: argparse.Namespace, folder: Path) -> None:
    counts = [int(count) for count in chosen.adapters.split(",")]
    sizes = [int(size) for size in chosen.requests.split(",")]
    began = time.perf_counter()
    async with started(folder, chosen, max(counts), max(sizes)) as engine:
        start_s = time.perf_counter() - began
        loaded, load_s, digest_s = await _load(engine, folder, max(counts))
        first_s = await _first_token(engine, loaded[-1], chosen)
        shapes.show(
            ("shape", "dtype", "start s", "adapters", "load s, each", "digest s, each", "first token s"),
            [
                (
                    chosen.shape,
                    chosen.dtype,
                    f"{start_s:.0f}",
                    len(loaded),
                    f"{load_s:.3f}",
                    f"{digest_s:.3f}",
                    f"{first_s:.3f}",
                )
            ],
        )
        rows = [
            (chosen.shape, chosen.dtype, size, count, f"{await _rate(engine, loaded[:count], size, chosen):.0f}")
            for size in sizes
            for count in counts
        ]
        shapes.show(("shape", "dtype", "requests", "adapters", "tokens/s"), rows)


async def _load(engine: Any, folder: Path, count: int) -> tuple[list[Any], float, float]:
    from marlaas_worker.rollout.engine import LoadedAdapter

    loaded, load_s, digest_s = [], 0.0, 0.0
    for number in range(count):
        adapter = LoadedAdapter(f"bench{number}", number + 1, write_adapter_of(folder, number))
        began = time.perf_counter()
        await engine.load(adapter)
        done = time.perf_counter()
        await engine.digest(adapter)
        load_s, digest_s = load_s + done - began, digest_s + time.perf_counter() - done
        loaded.append(adapter)
    return loaded, load_s / count, digest_s / count


def write_adapter_of(folder: Path, number: int) -> Path:
    """Write a random adapter of all linear layers."""
    draw, tensors = torch.Generator().manual_seed(number), {}
    for name, shape in _modules(folder):
        tensors[tensor_name(name, "A")] = torch.randn(shapes.RANK, shape[1], generator=draw) / shape[1] ** 0.5
        tensors[tensor_name(name, "B")] = torch.randn(shape[0], shapes.RANK, generator=draw) * 0.004
    place = folder / f"adapter{number}"
    place.mkdir(exist_ok=True)
    for name, data in write_adapter(tensors, AdapterConfig(shapes.RANK, shapes.ALPHA)).items():
        (place / name).write_bytes(data)
    return place


def _modules(folder: Path) -> list[tuple[str, tuple[int, int]]]:
    from safetensors import safe_open

    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for key in weights.keys():  # noqa: SIM118 (no mapping)
                if key.endswith("proj.weight"):
                    found.append((key.removesuffix(".weight"), tuple(weights.get_slice(key).get_shape())))
    return found


async def _first_token(engine: Any, adapter: Any, chosen: argparse.Namespace) -> float:
    from marlaas_worker.rollout.engine import Sampling

    ids = np.arange(2, 34, dtype=np.int32)
    began = time.perf_counter()
    await engine.generate("first", adapter, ids, Sampling(1.0, 1, 0))
    return time.perf_counter() - began


async def _rate(engine: Any, adapters: Sequence[Any], size: int, chosen: argparse.Namespace) -> float:
    from marlaas_worker.rollout.engine import Sampling

    draw = np.random.default_rng(size)
    prompts = draw.integers(2, shapes.SHAPES[chosen.shape][0], (size, 32)).astype(np.int32)

    async def one(turn: int, at: int) -> int:
        name = f"r{turn}.{size}.{len(adapters)}.{at}"
        made = await engine.generate(name, adapters[at % len(adapters)], prompts[at], Sampling(1.0, chosen.reply, at))
        return len(made.output_ids)

    best = 0.0
    for turn in range(chosen.repeats + 1):
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one(turn, at) for at in range(size))))
        best = max(best, tokens / (time.perf_counter() - began)) if turn else best
    return best
