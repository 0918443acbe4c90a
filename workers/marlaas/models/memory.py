"""Whether a pool's workers fit this machine's memory, estimated before any of them loads a weight.

An estimate: weights, KV cache, adapters at their largest, and what a bare process takes. Activations of the trainer are not in it, because
they depend on the job (`training.microbatchTokens` bounds them). On a machine with a GPU the weights lie there, and nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from marlaas.models.inspection import ModelFacts
    from marlaas_api.kinds import ModelPoolSpec

ENGINE_PROCESS_BYTES = 3 * 2**29
TRAINER_PROCESS_BYTES = 3 * 2**28
_OPTIMIZER_COPIES = 5
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


def demands(facts: ModelFacts, spec: ModelPoolSpec) -> list[Demand]:
    """What the pool's engines and trainers will hold on a machine without a GPU."""
    return [_engine(facts, spec), _trainer(facts, spec)]


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


def _trainer(facts: ModelFacts, spec: ModelPoolSpec) -> Demand:
    """float32 on a CPU; one agent bound: weights, gradients, their sum and two moments."""
    adapter = _OPTIMIZER_COPIES * facts.adapter_parameters(spec.max_rank) * 4
    parts = {
        "weights as 32-bit numbers": facts.num_parameters * 4,
        "adapter": adapter,
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
