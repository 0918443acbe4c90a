"""Estimates whether a pool's workers fit this machine's memory, before any worker loads weights.

The estimate adds up peaks by purpose. docs/reference/models.md has the formulas; `python -m bench memory` compares them with
measured peaks. On a machine with a GPU the weights are in GPU memory, and nothing is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marlaas_api.numeric import TRAINED_COPIES, quantity

if TYPE_CHECKING:
    from marlaas.models.inspection import ModelFacts
    from marlaas_api.kinds import ModelPoolSpec
    from marlaas_api.messages import JobSpec, PoolSpec

    Spec = ModelPoolSpec | PoolSpec
ENGINE_PROCESS_BYTES = 11 * 2**27
TRAINER_PROCESS_BYTES = 13 * 2**26
CPU_KV_CACHE, CPU_ACTIVATIONS = "512Mi", "2Gi"
"""Values of an unset `kvCacheBytes` and `activationBytes` on a CPU. On a GPU, `memory_plan` chooses them."""
MICROBATCH_TOKENS = 4096
_PUBLISHED_COPIES = (
    8  # of the agent that publishes: weights, their file, and the state's three parts, as tensors and as bytes
)
_CHUNK_BYTES, _LEAST_ROWS, _CHUNK_COPIES = 16 << 20, 64, 3  # `trainer.head`: logits, their softmax, a temporary
_HEAP = {4: 1.17, 2: 1.35}
"""Resident memory per tensor byte in a forward pass, by the dtype's bytes. Temporaries wider than kept tensors fragment the heap more."""
_AGENTS = "adapters and optimizer"
USABLE = 0.8
"""Part of the memory that is left for agents. The rest is for the version that is being published, and what is not estimated."""
_GIB = 2**30
_NUMBER_BYTES = {"auto": 4, "float32": 4, "bfloat16": 2, "float16": 2}
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True)
class Demand:
    """Memory of one worker of a role in bytes, by purpose; `workers` of them run."""

    role: str
    workers: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all workers."""
        return self.workers * sum(self.parts.values())

    def __str__(self) -> str:
        parts = " + ".join(f"{what} {gib(size)}" for what, size in self.parts.items())
        return (
            f"{self.role}: {f'{self.workers} x (' if self.workers > 1 else ''}{parts}{')' if self.workers > 1 else ''}"
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory in bytes: `limit` that processes here can ever use, `free` that is available now."""

    limit: int
    free: int


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """Room of one engine's KV cache. max_tokens: longest conversation."""

    num_tokens: int
    max_tokens: int
    token_bytes: int

    @property
    def num_sequences(self) -> int:
        """Number of conversations of the greatest length that fit at once."""
        return self.num_tokens // self.max_tokens

    def needed(self, num_sequences: int) -> str:
        """Return the quantity of memory that holds that many conversations of the greatest length."""
        mebibytes = math.ceil(num_sequences * self.max_tokens * self.token_bytes / 2**20)
        return f"{math.ceil(mebibytes / 1024)}Gi" if mebibytes >= 4096 else f"{64 * math.ceil(mebibytes / 64)}Mi"

    def __str__(self) -> str:
        number = self.num_sequences
        return f"{self.num_tokens:,} tokens, {number} conversation{'' if number == 1 else 's'} of {self.max_tokens:,} tokens"


def number_bytes(spec: Spec, *, on_gpu: bool) -> int:
    """Return the bytes of one weight of the base model in memory."""
    return _NUMBER_BYTES["bfloat16" if spec.rollout.dtype == "auto" and on_gpu else spec.rollout.dtype]


def cached_token(facts: ModelFacts, spec: Spec, *, on_gpu: bool) -> tuple[int, int]:
    """Return the bytes of a token in the KV cache, 0 if they are unknown, and the tokens of the longest conversation."""
    longest = min(spec.rollout.max_model_len, facts.max_positions or spec.rollout.max_model_len)
    has_cache = spec.rollout.engine == "vllm"
    return has_cache * facts.cached_values * number_bytes(spec, on_gpu=on_gpu), longest


def cache_room(facts: ModelFacts, spec: Spec, *, on_gpu: bool, size: int | None = None) -> CacheRoom | None:
    """Return the room of the pool's KV cache; None if the engine has none, or its size or the architecture is unknown.

    size: bytes of the cache; None: the pool's, which is unknown on a GPU if `kvCacheBytes` is unset.
    """
    each, longest = cached_token(facts, spec, on_gpu=on_gpu)
    if size is None and not (on_gpu and spec.rollout.kv_cache_bytes is None):
        size = cache_bytes(spec)
    return CacheRoom(size // each, longest, each) if each and size is not None else None


def cache_bytes(spec: Spec) -> int:
    """Return the bytes of an engine's KV cache on a CPU."""
    return int(quantity(spec.rollout.kv_cache_bytes or CPU_KV_CACHE))


def trainer_activations(spec: Spec) -> int:
    """Return the most bytes of a micro-batch's activations on a CPU."""
    return int(quantity(spec.trainer.activation_bytes or CPU_ACTIVATIONS))


def planned_tokens(spec: Spec, jobs: Sequence[JobSpec]) -> tuple[int, int]:
    """Return the largest rank and the largest micro-batch of the jobs; without jobs, the pool's and the default."""
    ranks = [agent.adapter.rank for job in jobs for agent in job.policies if agent.trainable]
    tokens = [job.training.microbatch_tokens for job in jobs]
    return max(ranks, default=spec.max_rank), max(tokens, default=MICROBATCH_TOKENS)


def demands(facts: ModelFacts, spec: ModelPoolSpec, jobs: Sequence[JobSpec] = ()) -> list[Demand]:
    """Return the peak memory of the pool's engines and trainers on a machine without a GPU.

    Without jobs, the estimate is for one agent at the pool's largest rank. jobs: each with its agents on the pool only.
    """
    return [_engine(facts, spec), _trainer(facts, spec, jobs)]


@dataclass(frozen=True, slots=True)
class PoolUse:
    """A pool of this machine. jobs: each with its agents on the pool only."""

    facts: ModelFacts
    spec: ModelPoolSpec
    jobs: Sequence[JobSpec] = ()


def agent_rooms(pools: Sequence[PoolUse], free: int) -> list[int]:
    """Return the memory that each trainer of a pool has for its agents, by pool; more agents take turns in it.

    All trainers of the machine share equally what is left by the other needs of all workers. A trainer has at least the room
    of any single job, because `marlaas run` has accepted the jobs.

    Args:
        free: memory in bytes that is available before the workers start.
    """
    needed = [demand for pool in pools for demand in demands(pool.facts, pool.spec, pool.jobs)]
    other = sum(demand.total - demand.workers * demand.parts.get(_AGENTS, 0) for demand in needed)
    num_trainers = sum(pool.spec.trainer.replicas for pool in pools)
    part = int(USABLE * max(0, free - other) / max(1, num_trainers))
    return [max(part, *job_bytes(pool.facts, pool.spec.max_rank, pool.jobs)) for pool in pools]


def job_bytes(facts: ModelFacts, max_rank: int, jobs: Sequence[JobSpec]) -> list[int]:
    """Return the memory that each job's agents need in a trainer; of one agent at the pool's largest rank without jobs."""
    sizes = [sum(_trained(facts, job)) for job in jobs] or [TRAINED_COPIES * facts.adapter_parameters(max_rank)]
    return [_NUMBER_BYTES["float32"] * size for size in sizes]


def _trained(facts: ModelFacts, job: JobSpec) -> list[int]:
    """Return the numbers that each of a job's agents has in a trainer: see `JobSpec.num_copies`."""
    return [
        job.num_copies(agent) * facts.adapter_parameters(agent.adapter.rank, agent.adapter.targets)
        for agent in job.policies
        if agent.trainable
    ]


def activation_bytes(facts: ModelFacts, spec: ModelPoolSpec, rank: int, num_tokens: int) -> int:
    """Return the bytes that a micro-batch of `num_tokens` padded tokens keeps between forward and backward pass.

    A linear layer counts its input, its output and `rank` values of its adapter. That also covers what other parts
    keep (attention keeps queries, keys, values and outputs). The two norms of a layer keep float32 inputs in a
    16-bit model. Of a micro-batch that needs more than `activationBytes`, layers are recomputed until it
    keeps no more (`trainer.memory`).
    """
    number = _NUMBER_BYTES[spec.rollout.dtype]
    linear = sum(out + into + rank for shapes in facts.linear_layers.values() for out, into in shapes)
    norms = 4 * facts.hidden_size * facts.num_layers if number == 2 else 0
    kept = num_tokens * (number * linear + norms)
    most = trainer_activations(spec)
    if kept <= most or not facts.num_layers:
        return min(kept, most)
    inputs = num_tokens * number * facts.hidden_size * facts.num_layers
    return max(most, inputs + kept // facts.num_layers)


def head_bytes(facts: ModelFacts, spec: ModelPoolSpec, num_tokens: int) -> int:
    """Return the bytes of the logits of a chunk of tokens. A 16-bit model adds its head in float32, which a CPU multiplies by."""
    number = _NUMBER_BYTES[spec.rollout.dtype]
    logits = min(num_tokens * 4 * facts.vocab_size, max(_CHUNK_BYTES, _LEAST_ROWS * 4 * facts.vocab_size))
    return _CHUNK_COPIES * logits + (4 * facts.vocab_size * facts.hidden_size if number == 2 else 0)


def shortage(needed: Sequence[Demand], available: int) -> tuple[str, str] | None:
    """Return two halves of a sentence if the memory is too small: needed and available memory, then the parts and the remedy.

    None if it fits.
    """
    total = sum(demand.total for demand in needed)
    if total <= available:
        return None
    numbers = "; ".join(str(demand) for demand in needed)
    return (
        f"about {gib(total)} GiB of memory are needed, and {gib(available)} GiB are available",
        f" (in GiB, {numbers}): use a smaller model, a dtype of 16 bits or fewer replicas, or lower kvCacheBytes, adapterSlots or maxRank",
    )


def gib(size: int) -> str:
    """Format bytes as GiB with one decimal."""
    return f"{size / _GIB:.1f}"


def machine(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Machine | None:
    """Return the memory of this machine or container; None if it is unknown (not Linux)."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        known = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        total, free = known["MemTotal"], known["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return None
    limit = min([total, *_cgroup_limits(proc, cgroups)])
    return Machine(limit, min(free, limit))


def has_gpu(dev: Path = Path("/dev")) -> bool:
    """Return whether an NVIDIA or AMD accelerator has a device file."""
    return (dev / "nvidia0").exists() or (dev / "kfd").exists()


def _engine(facts: ModelFacts, spec: ModelPoolSpec) -> Demand:
    """Return the memory of an engine.

    vLLM holds slots + 1 adapters at full rank, and twice as many on the host (see `rollout.vllm_settings`).
    """
    number = _NUMBER_BYTES[spec.rollout.dtype]
    adapters = 3 * (spec.adapter_slots + 1) * facts.adapter_parameters(spec.max_rank) * number
    parts = {f"weights as {number * 8}-bit numbers": facts.num_parameters * number}
    if spec.rollout.engine == "vllm":
        parts["KV cache"] = cache_bytes(spec)
    return Demand("engine", spec.rollout.replicas, parts | {"adapters": adapters, "process": ENGINE_PROCESS_BYTES})


def _trainer(facts: ModelFacts, spec: ModelPoolSpec, jobs: Sequence[JobSpec]) -> Demand:
    """Return the memory of a trainer.

    The base model has the engine's dtype; adapters, gradients and moments are float32. The agents are divided among
    the trainers.
    """
    number = _NUMBER_BYTES[spec.rollout.dtype]
    adapters = [agent.adapter for job in jobs for agent in job.policies if agent.trainable]
    sizes = [facts.adapter_parameters(one.rank, one.targets) for one in adapters]
    sizes = sizes or [facts.adapter_parameters(spec.max_rank)]
    trained = [size for job in jobs for size in _trained(facts, job)] or [TRAINED_COPIES * sizes[0]]
    bound = -(-sum(trained) // spec.trainer.replicas)
    rank, tokens = planned_tokens(spec, jobs)
    parts = {
        f"weights as {number * 8}-bit numbers": facts.num_parameters * number,
        _AGENTS: 4 * (bound + _PUBLISHED_COPIES * max(sizes)),
        "activations": int(_HEAP[number] * activation_bytes(facts, spec, rank, tokens))
        + head_bytes(facts, spec, tokens),
        "process": TRAINER_PROCESS_BYTES,
    }
    return Demand("trainer", spec.trainer.replicas, parts)


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the memory limits of the process's cgroup and its parents: cgroup v2, and v1 as a container mounts it (own group at the root)."""
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
