"""Cost and accuracy of the engine gateway: `python bench/rollout_engine.py --shape tiny --dtype float32 --threads 1`.

Prints one line per figure. Raw vLLM is `AsyncLLM.generate` of the same engine with the same parameters, measured in
turns with the gateway.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from marlaas_api.blobs import BlobRef, sha256_hex
from marlaas_api.documents import pool_spec
from marlaas_api.kinds import ModelPoolSpec
from marlaas_api.messages import Manifest, Probe
from marlaas_api.wire import pack_ids, pack_logprobs
from marlaas_worker.adapters import AdapterConfig, tensor_digests, tensor_name, write_adapter
from marlaas_worker.rollout.engine import LoadedAdapter, Sampling
from marlaas_worker.rollout.proof import load_proven
from marlaas_worker.rollout.vllm_engine import VllmEngine, _lora_request, _sampling

SHAPES = {
    "tiny": {
        "vocab_size": 96, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    },
    "smollm2": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
    },
}  # fmt: skip
RANK = 16
PROMPT_TOKENS, NEW_TOKENS, REQUESTS, RUNNING, PROBES = 24, 32, 64, 16, 4


def random_model(shape: str, folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPES[shape], tie_word_embeddings=True, initializer_range=0.05)).save_pretrained(
        folder
    )
    return folder


def base_model(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def make_adapter(base: Any, folder: Path, number: int, size: float = 0.01) -> Manifest:
    """Write a random adapter of all linear layers and return its manifest, with probes scored by transformers.

    size: standard deviation of the elements of B; those of A make the layer's inputs keep their size.
    """
    from peft import PeftModel

    generator = torch.Generator().manual_seed(number)
    tensors: dict[str, torch.Tensor] = {}
    linears = [(name, m) for name, m in base.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    for name, linear in linears:
        a = torch.randn(RANK, linear.in_features, generator=generator) / linear.in_features**0.5
        tensors[tensor_name(name, "A")] = a
        tensors[tensor_name(name, "B")] = torch.randn(linear.out_features, RANK, generator=generator) * size
    files = write_adapter(tensors, AdapterConfig(RANK, 2 * RANK))
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    adapted = PeftModel.from_pretrained(base, str(folder)).eval()
    ids = torch.randint(2, base.config.vocab_size, (PROBES, 64), generator=generator)
    with torch.inference_mode():
        logprobs = torch.log_softmax(adapted(input_ids=ids).logits[:, :-1].float(), -1).gather(2, ids[:, 1:, None])[
            ..., 0
        ]
    adapted.unload()
    probes = [
        Probe(ids=pack_ids(i.tolist()), logprobs=pack_logprobs(p.tolist())) for i, p in zip(ids, logprobs, strict=True)
    ]
    refs = {name: BlobRef(name=name, sha256=sha256_hex(data), size_bytes=len(data)) for name, data in files.items()}
    return Manifest(
        namespace="bench", job="job", uid="u", agent=f"a{number}", version=1, step=0, parent=None, rank=RANK, files=refs,
        state=None, tensor_digests=tensor_digests(tensors, 2.0), probes=tuple(probes),
        probe_tolerance=1.0,
    )  # fmt: skip


def prompts(vocabulary: int) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.integers(2, vocabulary, PROMPT_TOKENS).astype(np.int32) for _ in range(REQUESTS)]


@dataclass(frozen=True)
class Rate:
    """Tokens per second of wall time, and CPU milliseconds per token of this process and of vLLM's processes."""

    tokens_per_s: float
    own_ms: float
    vllm_ms: float


async def rate(run: Callable[[int], Awaitable[int]], engine: VllmEngine) -> Rate:
    own, below = psutil.Process(), engine.processes
    began, own_began, below_began = time.perf_counter(), cpu_s([own]), cpu_s(below)
    tokens = sum(await asyncio.gather(*(run(n) for n in range(REQUESTS))))
    wall, own_s, below_s = time.perf_counter() - began, cpu_s([own]) - own_began, cpu_s(below) - below_began
    return Rate(tokens / wall, 1000 * own_s / tokens, 1000 * below_s / tokens)


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def medians(rates: list[Rate]) -> dict[str, float]:
    return {
        name: round(statistics.median(getattr(each, name) for each in rates), 3)
        for name in ("tokens_per_s", "own_ms", "vllm_ms")
    }


def at_the_end(params: Any) -> Any:
    """Return the same sampling parameters, with all tokens in one message at the end, as a caller without streaming would use."""
    from vllm.sampling_params import RequestOutputKind

    params.output_kind, params.stream_interval = RequestOutputKind.FINAL_ONLY, None
    return params


async def num_tokens(streamed: Any) -> int:
    """Return the number of tokens of a raw vLLM generation."""
    return sum([len(output.outputs[0].token_ids) async for output in streamed])


async def throughput(engine: VllmEngine, adapters: list[LoadedAdapter], vocabulary: int, rounds: int) -> dict[str, Any]:
    """Return the median rates of our generate and of raw vLLM, measured in turns."""
    ids = prompts(vocabulary)
    numbers = iter(range(10**6))
    assert engine._incarnation is not None
    raw_engine = engine._incarnation.llm

    async def ours(n: int) -> int:
        sampling = Sampling(1.0, NEW_TOKENS, n)
        return len(
            (await engine.generate(f"o{next(numbers)}", adapters[n % len(adapters)], ids[n], sampling)).output_ids
        )

    async def raw(n: int) -> int:
        prompt = {"prompt_token_ids": ids[n].tolist()}
        params = at_the_end(_sampling(Sampling(1.0, NEW_TOKENS, n), NEW_TOKENS, frozenset()))
        lora = _lora_request(adapters[n % len(adapters)])
        return await num_tokens(raw_engine.generate(prompt, params, f"r{next(numbers)}", lora_request=lora))

    await rate(ours, engine)
    pairs = [(await rate(ours, engine), await rate(raw, engine)) for _ in range(rounds)]
    gains = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
    both = {"ours": medians([one for one, _ in pairs]), "raw": medians([other for _, other in pairs])}
    return {**both, "ratio": round(statistics.median(gains), 3)}


async def load_latency(
    engine: VllmEngine, manifests: list[Manifest], folder: Path, busy: list[LoadedAdapter]
) -> list[Any]:
    """Load and prove versions one after another while 16 requests run; return the seconds of each phase."""
    stop = asyncio.Event()

    async def keep_busy(n: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            await engine.generate(
                f"b{n}.{turn}", busy[n % len(busy)], np.arange(2, 40, dtype=np.int32), Sampling(1.0, 64, turn)
            )

    running = [asyncio.create_task(keep_busy(n)) for n in range(RUNNING)]
    await asyncio.sleep(1)
    proofs = []
    for number, manifest in enumerate(manifests):
        adapter = LoadedAdapter(manifest.adapter.engine_name, 1000 + number, folder / manifest.agent)
        began = time.perf_counter()
        proof = await load_proven(engine, manifest, adapter)
        first = time.perf_counter()
        await engine.generate(f"first{number}", adapter, np.arange(2, 40, dtype=np.int32), Sampling(1.0, 1, 0))
        proofs.append((time.perf_counter() - began, proof, time.perf_counter() - first))
        await engine.unload(adapter)
    stop.set()
    await asyncio.gather(*running)
    return proofs


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        await measure(options, Path(scratch))


async def measure(options: argparse.Namespace, scratch: Path) -> None:
    model = options.model or random_model(options.shape, scratch / "model")
    base = base_model(model)
    vocabulary = base.config.vocab_size
    manifests = [make_adapter(base, scratch / f"a{n}", n) for n in range(9)]
    del base
    rollout = {"dtype": options.dtype, "maxNumSeqs": REQUESTS, "kvCacheBytes": "1Gi", "threads": options.threads}
    spec = pool_spec(
        ModelPoolSpec.model_validate(
            {"model": {"path": str(model)}, "adapterSlots": 9, "maxRank": RANK, "rollout": rollout}
        )
    )
    engine = VllmEngine(model, spec, frozenset(), scratch / "vllm")
    began = time.perf_counter()
    await engine.start()
    report: dict[str, Any] = {"shape": options.shape, "dtype": options.dtype, "threads": options.threads}
    report["start_s"] = time.perf_counter() - began
    report["cores"] = len(os.sched_getaffinity(0))
    adapters = []
    gaps = []
    for n, manifest in enumerate(manifests[:8]):
        adapters.append(LoadedAdapter(manifest.adapter.engine_name, n + 1, scratch / manifest.agent))
        gaps.append((await load_proven(engine, manifest, adapters[-1])).probe_gap)
    report["probe_gap_mean"], report["probe_gap_max"] = statistics.mean(gaps), max(gaps)
    for count in (1, 8):
        report[f"tok_s_{count}_adapters"] = await throughput(engine, adapters[:count], vocabulary, options.rounds)
    proofs = await load_latency(engine, manifests[8:] * 5, scratch, adapters)
    report["load_s"] = round(statistics.median(p.load_s for _, p, _ in proofs), 4)
    report["probe_s"] = round(statistics.median(p.probe_s for _, p, _ in proofs), 4)
    report["first_token_s"] = round(statistics.median(t for _, _, t in proofs), 4)
    report["file_to_first_token_s"] = round(statistics.median(t for t, _, _ in proofs), 4)
    report["rss_mib"] = {p.name(): p.memory_info().rss >> 20 for p in (psutil.Process(), *engine.processes)}
    await engine.stop()
    for key, value in report.items():
        print(f"{key}: {json.dumps(value)}")


if __name__ == "__main__":
    asyncio.run(main())
