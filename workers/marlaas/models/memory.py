"""Whether a pool's workers fit this machine's memory, estimated before any of them loads a weight.

An estimate of peaks, by what takes them (docs/models.md has the formulas; `python -m bench memory` puts measured peaks beside them). On a machine with a
GPU the weights lie there, and nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marlaas.models.inspection import ModelFacts
    from marlaas_api.kinds import ModelPoolSpec, RLJobSpec

ENGINE_PROCESS_BYTES = 15 * 2**27
TRAINER_PROCESS_BYTES = 13 * 2**26
MICROBATCH_TOKENS = 4096
_TRAINED_COPIES = 4  # of each bound agent: weights, gradients, two moments
_PUBLISHED_COPIES = (
    8  # of the agent that publishes: weights, their file, and the state's three parts, as tensors and as bytes
)
_CHUNK_BYTES, _LEAST_ROWS, _CHUNK_COPIES = 16 << 20, 64, 3  # `trainer.head`: logits, their softmax, a temporary
_HEAP = {4: 1.17, 2: 1.35}
"""Resident bytes against bytes of tensors in a forward pass, by bytes of a number: the heap has gaps, more where temporaries are wider than what is kept."""
_GIB = 2**30
_NUMBER_BYTES = {"auto": 4, "float32": 4, "bfloat16": 2, "float16": 2}
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that one worker of a role holds, by what for; `workers` of them run."""

    role: str
    workers: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Of all workers."""
        return self.workers * sum(self.parts.values())

    def __str__(self) -> str:
        parts = " + ".join(f"{what} {gib(size)}" for what, size in self.parts.items())
        return (
            f"{self.role}: {f'{self.workers} x (' if self.workers > 1 else ''}{parts}{')' if self.workers > 1 else ''}"
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes of memory: `limit` that processes here can ever have, `free` that they could have now."""

    limit: int
    free: int


def demands(facts: ModelFacts, spec: ModelPoolSpec, jobs: Sequence[RLJobSpec] = ()) -> list[Demand]:
    """What the pool's engines and trainers will hold on a machine without a GPU, at most; without jobs, for one agent at the pool's largest rank."""
    return [_engine(facts, spec), _trainer(facts, spec, jobs)]


def activation_bytes(facts: ModelFacts, spec: ModelPoolSpec, rank: int, num_tokens: int) -> int:
    """Bytes that a micro-batch of so many padded tokens keeps between forward and backward pass.

    Of a linear layer its input and output, or as much elsewhere (attention keeps queries, keys, values and outputs); of its adapter `rank` numbers. A 16-bit
    model's two norms a layer keep their inputs in float32. A micro-batch that needs more than `activationBytes` keeps less (`trainer.recompute`).
    """
    from marlaas_api.kinds import quantity

    number = _NUMBER_BYTES[spec.rollout.dtype]
    linear = sum(out + into + rank for shapes in facts.linear_layers.values() for out, into in shapes)
    norms = 4 * facts.hidden_size * facts.num_layers if number == 2 else 0
    kept = num_tokens * (number * linear + norms)
    most = int(quantity(spec.trainer.activation_bytes))
    if kept <= most or not facts.num_layers:
        return min(kept, most)
    inputs = num_tokens * number * facts.hidden_size * facts.num_layers
    return max(most, inputs + kept // facts.num_layers)


def head_bytes(facts: ModelFacts, spec: ModelPoolSpec, num_tokens: int) -> int:
    """Bytes of the logits of a chunk of tokens; of a 16-bit model also its head in float32, which a CPU multiplies by."""
    number = _NUMBER_BYTES[spec.rollout.dtype]
    logits = min(num_tokens * 4 * facts.vocab_size, max(_CHUNK_BYTES, _LEAST_ROWS * 4 * facts.vocab_size))
    return _CHUNK_COPIES * logits + (4 * facts.vocab_size * facts.hidden_size if number == 2 else 0)


def shortage(needed: Sequence[Demand], available: int) -> tuple[str, str] | None:
    """The halves of a sentence: what is needed and what is there; the numbers, and what to do. None if it fits."""
    total = sum(demand.total for demand in needed)
    if total <= available:
        return None
    numbers = "; ".join(str(demand) for demand in needed)
    return (
        f"about {gib(total)} GiB of memory are needed and {gib(available)} GiB are there",
        f" (in GiB, {numbers}): use a smaller model, a dtype of 16 bits or fewer replicas, or lower kvCacheBytes, adapterSlots or maxRank",
    )


def gib(size: int) -> str:
    """Bytes as GiB, to a tenth."""
    return f"{size / _GIB:.1f}"


def machine(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Machine | None:
    """This machine's or container's memory; None where it cannot be told (no Linux)."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        known = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        total, free = known["MemTotal"], known["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return None
    limit = min([total, *_cgroup_limits(proc, cgroups)])
    return Machine(limit, min(free, limit))


def has_gpu(dev: Path = Path("/dev")) -> bool:
    """Whether the kernel shows an NVIDIA or AMD accelerator."""
    return (dev / "nvidia0").exists() or (dev / "kfd").exists()


def _engine(facts: ModelFacts, spec: ModelPoolSpec) -> Demand:
    """vLLM holds slots + 1 adapters at full rank, and twice as many more on the host (see `rollout.vllm_settings`)."""
    from marlaas_api.kinds import quantity

    number = _NUMBER_BYTES[spec.rollout.dtype]
    adapters = 3 * (spec.adapter_slots + 1) * facts.adapter_parameters(spec.max_rank) * number
    parts = {f"weights as {number * 8}-bit numbers": facts.num_parameters * number}
    if spec.rollout.engine == "vllm":
        parts["KV cache"] = int(quantity(spec.rollout.kv_cache_bytes))
    return Demand("engine", spec.rollout.replicas, parts | {"adapters": adapters, "process": ENGINE_PROCESS_BYTES})


def _trainer(facts: ModelFacts, spec: ModelPoolSpec, jobs: Sequence[RLJobSpec]) -> Demand:
    """The base's dtype is the engine's; adapters, gradients and moments are float32. The trainers share the agents."""
    number = _NUMBER_BYTES[spec.rollout.dtype]
    adapters = [agent.adapter for job in jobs for agent in job.agents if agent.trainable]
    sizes = [facts.adapter_parameters(one.rank, one.targets) for one in adapters]
    sizes = sizes or [facts.adapter_parameters(spec.max_rank)]
    bound = -(-sum(sizes) // spec.trainer.replicas)
    rank = max((one.rank for one in adapters), default=spec.max_rank)
    tokens = max((job.training.microbatch_tokens for job in jobs), default=MICROBATCH_TOKENS)
    parts = {
        f"weights as {number * 8}-bit numbers": facts.num_parameters * number,
        "adapters and optimizer": 4 * (_TRAINED_COPIES * bound + _PUBLISHED_COPIES * max(sizes)),
        "activations": int(_HEAP[number] * activation_bytes(facts, spec, rank, tokens))
        + head_bytes(facts, spec, tokens),
        "process": TRAINER_PROCESS_BYTES,
    }
    return Demand("trainer", spec.trainer.replicas, parts)


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    """Limits of the process' group and those around it: version 2, and version 1 whose own group is mounted at the root in a container."""
    yield from _number(cgroups / "memory" / "memory.limit_in_bytes")
    try:
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        if line.startswith("0::"):
            own = cgroups / line[3:].strip().lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(cgroups):
                    yield from _number(folder / "memory.max")


def _number(file: Path) -> Iterator[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return
    if text.isdigit() and int(text) < _NO_LIMIT:
        yield int(text)
