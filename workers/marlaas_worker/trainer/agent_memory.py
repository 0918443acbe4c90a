"""Memory that a trainer has for its agents: adapters, gradients, optimizer moments and KL references, all in float32.

The orchestrator admits jobs whose agents need at most `capacity.AGENTS_PER_PLACE` times this memory
(`ReplicaReport.agent_room_bytes`); agents that do not fit at the same time are parked (`room`).

Under the local runner, whose workers share a machine, the size of this memory is the runner's estimate (`PoolDocument.agent_room_bytes`).
Else a trainer measures the memory that is free once the base model is loaded, subtracts the activations, and takes the part `USABLE` of
the rest. On a CPU, the free memory is

- in a container with a limit: what the limit leaves;
- else: `UNLIMITED_PART` of the machine's available memory, since other processes of the machine need memory too.
"""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from marlaas.models.inspection import inspect
from marlaas.models.memory import trainer_activations
from marlaas.models.memory_plan import activation_limit, refusal, trainer_plan, usable
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import PoolDocument
from marlaas_api.numeric import TRAINED_COPIES
from marlaas_worker.reporter import resident_bytes
from marlaas_worker.trainer.model import BaseModel

_NUMBER_BYTES = 4
USABLE = 0.8
"""Part of the free memory that agents may have. The rest is for the version that is being published, and fragmentation."""
UNLIMITED_PART = 0.5
CACHE_PART = 0.25
"""Part of the free host memory that `versions.VersionCache` may have if the trainer is on an accelerator."""
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class AgentMemory:
    """Memory of a trainer for its agents, in bytes."""

    room_bytes: int = 0
    """For all agents together; 0 if unknown."""
    bytes_per_rank: int = 0
    """Bytes that one agent needs for each unit of its rank, without a KL reference and with one update a step."""
    host_bytes: int = 0
    """Host memory for the cached versions of agents; 0 if the agents are in host memory themselves."""
    activation_bytes: int = 0
    """Most memory that a micro-batch's activations may take (`BaseModel.limit_activations`)."""


def measure(model: BaseModel, pool: PoolDocument) -> AgentMemory:
    """Measure the memory for agents. Call it after the base model was loaded, and before an agent is bound."""
    bytes_per_rank = TRAINED_COPIES * _NUMBER_BYTES * model.parameters_per_rank
    most = trainer_activations(pool.spec)
    if model.device.type != "cuda":
        if pool.agent_room_bytes:
            return AgentMemory(pool.agent_room_bytes, bytes_per_rank, 0, most)
        limit = memory_limit()
        free = int(UNLIMITED_PART * psutil.virtual_memory().available) if limit is None else limit - resident_bytes()
        most = at_most_half(most, free)
        return AgentMemory(room_bytes(free, most), bytes_per_rank, 0, most)
    free, _ = torch.cuda.mem_get_info(model.device)
    host_bytes = int(CACHE_PART * max(0, _free_host_bytes()))
    if pool.spec.trainer.activation_bytes is not None:
        if pool.agent_room_bytes:
            return AgentMemory(pool.agent_room_bytes, bytes_per_rank, host_bytes, most)
        most = at_most_half(most, free)
        return AgentMemory(room_bytes(free, most), bytes_per_rank, host_bytes, most)
    plan, _ = trainer_plan(inspect(Path(pool.model_path)), pool.spec)
    left = activation_limit(free - plan.workspace - plan.agents)
    return AgentMemory(max(1, int(USABLE * (free - left))), bytes_per_rank, host_bytes, left)


def refuse_small_card(pool: PoolDocument) -> None:
    """Raise InvalidInput, with the numbers, if the least memory that a trainer of this pool needs exceeds that of this process's card."""
    plan, _ = trainer_plan(inspect(Path(pool.model_path)), pool.spec)
    there = usable(torch.cuda.mem_get_info()[1])
    if plan.total > there:
        raise InvalidInput(refusal("a trainer", plan, there))


def _free_host_bytes() -> int:
    available, limit = psutil.virtual_memory().available, memory_limit()
    return available if limit is None else min(available, limit - resident_bytes())


def at_most_half(activation_bytes: int, free: int) -> int:
    """Return `activationBytes`, but no more than half of the free bytes: the other half is for agents. free: 0 if it is not known."""
    return activation_bytes if free == 0 else min(activation_bytes, max(0, free // 2))


def room_bytes(free: int, activation_bytes: int) -> int:
    """Return the bytes for agents: the part `USABLE` of what the activations leave of `free`, at least 1; 0 (not known) if `free` is 0."""
    return 0 if free == 0 else max(1, int(USABLE * (free - activation_bytes)))


def memory_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory limit of this container in bytes; None if there is none. cgroup: where cgroups are mounted."""
    for name in _LIMITS:
        try:
            text = (cgroup / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return None
