"""Model shapes with random weights, created on the measuring machine; options and clocks that the measurements share."""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import marlaas_worker.trainer.model as trainer_model
from marlaas_worker.adapters import DTYPES
from marlaas_worker.trainer.batching import MicroBatch, Segment, chain, collate
from marlaas_worker.trainer.model import BaseModel

_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")  # fmt: skip
SHAPES = {
    "tiny": (96, 128, 384, 3, 4, 2),
    "smollm2": (49152, 576, 1536, 30, 9, 3),
    "1.5b": (151936, 1536, 8960, 28, 12, 2),
    "8b": (128256, 4096, 14336, 32, 32, 8),
}
RANK, ALPHA = 16, 32
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def options(name: str, about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.gpu {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--model",
        type=Path,
        help="a folder to use, or to make the random model in; default: a model that is drawn on the device",
    )
    return parser


def random_model(chosen: argparse.Namespace) -> Path:
    """Save a random model of the chosen shape, for an engine, which reads a folder; keep a folder that already has one."""
    folder = Path(chosen.model or tempfile.mkdtemp(prefix="marlaas-gpu-"))
    if not (folder / "config.json").exists():
        drawn_model(chosen).save_pretrained(folder)
        release(chosen.device)
    return folder


def config(shape: str) -> Any:
    """Return the configuration of a shape."""
    from transformers import LlamaConfig

    sizes = dict(zip(_KEYS, SHAPES[shape], strict=True))
    return LlamaConfig(**sizes, max_position_embeddings=16384, tie_word_embeddings=shape == "smollm2")


def folder_of(chosen: argparse.Namespace) -> Path:
    """Return the folder of the model for the trainer; without --model nothing is written, and the model is drawn at each load."""
    return random_model(chosen) if chosen.model is not None else Path(f"random-{chosen.shape}")


def drawn_model(chosen: argparse.Namespace) -> Any:
    """Draw a Llama of the chosen shape and dtype on the device, the same one each time: one or two seconds for an 8b."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(chosen.device):
        return AutoModelForCausalLM.from_config(config(chosen.shape), dtype=DTYPES[chosen.dtype])


def plain_model(chosen: argparse.Namespace, folder: Path) -> Any:
    """Return a model of transformers on the device."""
    from transformers import AutoModelForCausalLM

    if chosen.model is None:
        return drawn_model(chosen)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[chosen.dtype]).to(chosen.device)


def base_model(
    chosen: argparse.Namespace, folder: Path, activation_bytes: int | None = None, dtype: torch.dtype | None = None
) -> BaseModel:
    """Return the trainer's model, from its folder or drawn on the device. dtype: default: the chosen one."""

    def draw(_: Path, wanted: torch.dtype) -> Any:
        return drawn_model(chosen).to(wanted).requires_grad_(False).eval()

    module: Any = trainer_model
    load = module.load_base_model
    if chosen.model is None:
        module.load_base_model = draw
    try:
        return BaseModel(str(folder), chosen.device, activation_bytes, dtype=dtype or DTYPES[chosen.dtype])
    finally:
        module.load_base_model = load


def random_rows(vocab_size: int, rows: int, width: int) -> MicroBatch:
    """Return rows of random tokens; the later half of each is generated."""
    draw = np.random.default_rng(0)
    behaviour = np.full(width, -np.log(vocab_size), np.float32)
    made = []
    for _ in range(rows):
        ids = draw.integers(0, vocab_size, width).astype(np.int32)
        made.append(chain(Segment(ids, np.arange(width) >= width // 2, behaviour, 0, float(draw.normal()))))
    return collate(made)


def seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Return the shortest time of several runs, after one warm-up run."""
    taken = []
    for _ in range(repeats + 1):
        synchronise(device)
        began = time.perf_counter()
        work()
        synchronise(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Free cached memory and reset the peak counter."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> str:
    return f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device == "cuda" else "-"


def show(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a markdown table row by row, as the rows arrive."""
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    for row in rows:
        print("| " + " | ".join(str(value) for value in row) + " |", flush=True)
