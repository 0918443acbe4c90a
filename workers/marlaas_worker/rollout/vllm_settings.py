"""vLLM's start settings, and the search of its log for the reason of a failed start. Does not import vllm.

Reads the model's folder, vLLM's log, the GPU and the CPU cores; writes the logging configuration. Some settings work around
problems of vLLM 0.32:
- Its V2 runner needs a Triton that CPUs lack. On a GPU the V1 runner is chosen, too: it is the one that our tests run.
- Its CPU attention wants blocks of 32.
- On a CPU its core and worker processes exchange messages through shared memory, and each reader busy-waits for a
  second after a message (`shm_broadcast.SpinCondition`). So the worker runs inside the core process.
- On a CPU it computes norms and rotary embeddings in about ten tensor operations each, although it has a compiled
  kernel for each; see `vllm_cpu` for the norms.
- Without an explicit KV cache size it takes 92 % of the memory.
- A host cache no larger than the slots would evict running adapters.
- If the output head may be adapted, prompt logprobs in a batch of several requests end the engine for all
  tenants.
- On a CPU, a seeded request whose prompt is prefilled in chunks ends the engine for all tenants
  (`gpu_model_runner._bookkeeping_sync` rewinds a generator that cannot be rewound).
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from marlaas.models.cards import Card, cards
from marlaas.models.inspection import inspect, is_adaptable
from marlaas.models.memory import cache_bytes
from marlaas.models.memory_plan import engine_plan, refusal, usable
from marlaas_api.errors import InvalidInput, Permanent
from marlaas_api.messages.pool_spec import PoolSpec
from marlaas_worker.adapters import choose_dtype
from marlaas_worker.devices import check_gpus, uses_gpu
from marlaas_worker.rollout.engine import EngineLimits, ModelFolder
from marlaas_worker.rollout.engine_progress import CPU_PRODUCTS_PER_S, GPU_PRODUCTS_PER_S, busy_bound_s
from marlaas_worker.rollout.request_limiter import BLOCK_TOKENS

CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 8192
"""`max_num_batched_tokens` on a GPU, unless `max_num_seqs` is larger. With vLLM's default for this use, 2,048, the prefill of a long prompt
takes four times as many steps."""
START_SHARE = 0.05
"""Share of a GPU's memory that must be free when vLLM starts (`gpu_memory_utilization`). It has no other effect, because the KV cache's size is
given. With vLLM's default of 0.92, an engine does not start beside a trainer on one card."""
_OWN_FOLDER = Path(__file__).parent
"""Folder in which Numba caches compiled code (`adapter_groups`), if it is writable. Otherwise the engine's scratch folder is set as the cache:
environments could write to Numba's default, which is below HOME."""
_NORMS = ("rms_norm", "fused_add_rms_norm")
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_RECORD = re.compile(r"^@@(\w+) ", re.MULTILINE)
_ERROR_LINE = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Exit|Interrupt)\b.*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """All inputs of an engine's start; they do not change at a restart.

    Attributes:
        model: the base model.
        spec: the pool's.
        limits: the engine's slots, lengths and dtype, resolved from spec and model.
        scratch: folder of the engine's log and other files.
        cache_bytes: size of the KV cache.
    """

    model: ModelFolder
    spec: PoolSpec
    limits: EngineLimits
    scratch: Path
    cache_bytes: int

    @property
    def log(self) -> Path:
        """Log file of vLLM's processes."""
        return self.scratch / "vllm.log"

    @property
    def counters(self) -> Path:
        """File of the counters that vLLM's processes share with the role (`engine_progress`)."""
        return self.scratch / "engine-counters"


def vllm_settings(model: ModelFolder, spec: PoolSpec, scratch: Path) -> VllmSettings:
    """Return the start settings of an engine: those of the pool's spec, and chosen ones where the spec leaves them open.

    scratch: folder of the engine's log and other files. Raises InvalidInput if the spec is not supported, or does not fit the GPU.
    """
    if spec.tensor_parallel_size > 1:
        raise InvalidInput("tensorParallelSize above 1: slots cannot yet be proven under tensor parallelism; use 1")
    check_gpus(spec.rollout.gpus)
    dtype = choose_dtype(spec.rollout.dtype, uses_gpu())
    if uses_gpu() and dtype == "float32":
        raise InvalidInput(
            "rollout.dtype float32: on a GPU, vLLM's kernels for adapters compute only in 16 bits; use bfloat16 or auto"
        )
    limits = EngineLimits(
        slots=spec.adapter_slots,
        max_rank=spec.max_rank,
        max_model_len=min(spec.rollout.max_model_len, model.max_positions),
        max_num_seqs=spec.rollout.max_num_seqs,
        dtype=dtype,
    )
    card = _card() if uses_gpu() else None
    return VllmSettings(model, spec, limits, scratch, choose_cache_bytes(model.folder, spec, card))


def choose_cache_bytes(model: Path, spec: PoolSpec, card: Card | None) -> int:
    """Return the size of an engine's KV cache in bytes.

    It is the pool's setting, if there is one. Otherwise it is a default on a CPU, and on a GPU the usable free memory that the rest of the
    engine does not need (`engine_plan`).

    Args:
        model: folder of the base model.
        card: the GPU's memory; None on a CPU.

    Raises:
        InvalidInput: an engine needs more memory than the GPU has.
    """
    if card is None:
        return cache_bytes(spec)
    facts, there = inspect(model), usable(card.total)
    plan = engine_plan(facts, spec)
    if plan.total > there:
        raise InvalidInput(refusal("an engine", plan, there))
    return engine_plan(facts, spec, min(there, card.free) - plan.total).kv_cache


def _card() -> Card:
    """Return the memory of this process's GPU. Asks CUDA only if the driver's command fails: CUDA would keep a context in this process."""
    found = cards()
    if found:
        return found[0]
    free, total = torch.cuda.mem_get_info()
    return Card(total, free)


def choose_threads(wanted: int | None, num_cores: int) -> int:
    """Return the number of compute threads: `wanted`, or if it is None, one for each core but one.

    One core is left to the trainer, NATS and the sandboxes.
    """
    return wanted or max(1, num_cores - 1)


def num_threads(settings: VllmSettings) -> int:
    """Return the number of compute threads of an engine on a CPU."""
    return choose_threads(settings.spec.rollout.threads, len(os.sched_getaffinity(0)))


def environment(settings: VllmSettings, forks: bool) -> dict[str, str]:
    """Return the environment variables for vLLM's processes. forks: whether the core is forked from this process."""
    method = "fork" if forks else "spawn"
    common = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        START_METHOD: method,
    }
    if uses_gpu():
        return common
    return {
        **common,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(num_threads(settings)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else vLLM's CPU platform forces the executor `mp`; see `engine_arguments`
        **({} if os.access(_OWN_FOLDER, os.W_OK) else {"NUMBA_CACHE_DIR": str(settings.scratch / "numba")}),
        "TORCHDYNAMO_DISABLE": "1",  # With LoRA a model runs eagerly on a CPU; compiling one small kernel would delay the first turns.
    }


def engine_arguments(settings: VllmSettings, log_config: Path) -> dict[str, Any]:
    """Return the keyword arguments of `AsyncEngineArgs`. log_config: file of the logging configuration.

    vLLM gets one slot more than `limits.slots`: with all slots full, its `add_lora` may evict an adapter in use. For the
    same reason, its host cache of adapters has twice as many places as it has slots.
    """
    limits = settings.limits
    arguments: dict[str, Any] = {
        "model": str(settings.model.folder),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": limits.dtype,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": settings.cache_bytes,
        "enable_prefix_caching": True,
        "enable_lora": True,
        "max_loras": limits.slots + 1,
        "max_cpu_loras": 2 * (limits.slots + 1),
        "max_lora_rank": limits.max_rank,
        "lora_target_modules": sorted(adaptable_layers(settings.model.folder)),
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "marlaas_worker.rollout.vllm_extension.AdapterSlots",
        "scheduler_cls": "marlaas_worker.rollout.vllm_scheduler.open_scheduler",
        "disable_log_stats": True,
        "log_config_file": str(log_config),
    }
    if uses_gpu():
        arguments["max_num_batched_tokens"] = max(GPU_STEP_TOKENS, limits.max_num_seqs)
        arguments["gpu_memory_utilization"] = START_SHARE
        arguments["compilation_config"] = {
            "cudagraph_capture_sizes": graph_sizes(limits.max_num_seqs),
            "cudagraph_specialize_lora": False,  # every request has an adapter
        }
    else:
        arguments["distributed_executor_backend"] = "uni"
        arguments["compilation_config"] = {"custom_ops": ["none", "+rotary_embedding"]}
        arguments["kernel_config"] = {"ir_op_priority": {norm: ["cpu_c", "native"] for norm in _NORMS}}
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(CPU_STEP_TOKENS, limits.max_num_seqs, limits.max_model_len)
    return arguments


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes of CUDA graphs: powers of two, and `max_num_seqs`. A batch runs in the smallest graph that holds it.

    vLLM's default captures 35 sizes at 128 sequences, each with and without adapters, before the first turn.
    """
    return sorted({max_num_seqs, *(1 << power for power in range(max_num_seqs.bit_length()))})


def adaptable_layers(model: Path) -> set[str]:
    """Return the names of the linear layers (such as `q_proj`) that adapters may have.

    These are all linear layers except embeddings, head, routers and experts. They are read from the headers of the model's safetensors
    files. Raises InvalidInput if there are none. model: folder of the base model.
    """
    weights = (name.removesuffix(".weight") for name, shape in _shapes(model) if len(shape) == 2)
    names = {weight.rpartition(".")[2] for weight in weights if is_adaptable(weight)}
    if not names:
        raise InvalidInput(f"no linear layers in the *.safetensors of {model}; MARLaaS serves models in that format")
    return names


def longest_silence_s(settings: VllmSettings, batch_tokens: int) -> float:
    """Return for how many seconds a healthy engine may compute before its progress counters (`EngineCounts.work`) change.

    It is an upper bound, from the model's size and the slowest engine's speed, and at least MIN_BUSY_BOUND_S. On a CPU the counters change
    after every layer that can have an adapter, on a GPU after every batch.

    batch_tokens: tokens of the largest batch.
    """
    sizes = [prod(shape) for _, shape in _shapes(settings.model.folder)]
    if uses_gpu():
        return busy_bound_s(batch_tokens, sum(sizes), GPU_PRODUCTS_PER_S)
    return busy_bound_s(batch_tokens, max(sizes), CPU_PRODUCTS_PER_S)


def _shapes(model: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield name and shape of every tensor in the model's safetensors files."""
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        yield from ((name, entry["shape"]) for name, entry in header.items() if "shape" in entry)


def write_log_config(settings: VllmSettings) -> Path:
    """Start a new log, and keep the previous one; write the logging configuration for vLLM's processes, and return that file's path."""
    settings.scratch.mkdir(parents=True, exist_ok=True)
    if settings.log.exists():
        settings.log.replace(settings.log.with_suffix(".before.log"))
    settings.log.touch()
    handler = {"class": "logging.FileHandler", "filename": str(settings.log), "formatter": "record"}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"record": {"format": "@@%(levelname)s %(asctime)s %(process)d %(name)s: %(message)s"}},
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    path = settings.scratch / "vllm-logging.json"
    path.write_text(json.dumps(config))
    return path


def first_error(log: Path, since: int = 0) -> str:
    """Return the text of the first error after `since` bytes of vLLM's log; empty if there is none.

    The first error is the cause; later ones follow from it.
    """
    try:
        levels_and_texts = _RECORD.split(log.read_bytes()[since:].decode(errors="replace"))[1:]
    except OSError:
        return ""
    errors = [text for level, text in zip(levels_and_texts[::2], levels_and_texts[1::2], strict=True) if level in _LOUD]
    for text in errors:
        lines = _ERROR_LINE.findall(text)
        if lines:
            return str(lines[-1]).strip()
    return errors[0].partition(": ")[2].strip() if errors else ""


def start_failure(words: str, log: Path) -> Permanent:
    """Return the error of a failed start: InvalidInput if another start would fail in the same way, else Permanent.

    Another start fails alike if the error's kind is in _LASTING, unless the error is about memory, which may become free.

    Args:
        words: vLLM's error, `<kind>: <text>`.
        log: vLLM's log, named in the error's text.
    """
    kind, text = words.partition(":")[0].rpartition(".")[2], f"vLLM did not start: {words} (its log: {log})"
    return Permanent(text) if "memory" in words.lower() or kind not in _LASTING else InvalidInput(text)


_LASTING = frozenset(
    {
        "AttributeError",
        "ImportError",
        "KeyError",
        "ModuleNotFoundError",
        "NotImplementedError",
        "SafetensorError",
        "TypeError",
        "ValidationError",
        "ValueError",
    }
)
_LOUD = ("ERROR", "CRITICAL", "FATAL")
