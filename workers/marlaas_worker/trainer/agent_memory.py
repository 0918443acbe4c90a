"""Memory that a trainer has for its agents: adapters, gradients and optimizer moments, all in float32.

The orchestrator admits jobs whose agents need at most `capacity.AGENTS_PER_PLACE` times this memory
(`ReplicaReport.agent_room_bytes`); those that do not fit at a time are parked (`room`).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from marlaas_worker.reporter import resident_bytes
from marlaas_worker.trainer.model import BaseModel

_COPIES = 4  # weights, gradient, two moments
_NUMBER_BYTES = 4
USABLE = 0.8
"""Part of the free memory that agents may have. The rest is for the version that is being published, and fragmentation."""
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class AgentMemory:
    """room_bytes: for all agents together; 0 if unknown. bytes_per_rank: need of one agent for each unit of rank."""

    room_bytes: int = 0
    bytes_per_rank: int = 0


def measure(model: BaseModel, activation_bytes: int) -> AgentMemory:
    """Measure the memory for agents, after the base model was loaded and before an agent is bound."""
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        limit = memory_limit()
        free = 0 if limit is None else limit - resident_bytes()
    return AgentMemory(room_bytes(free, activation_bytes), _COPIES * _NUMBER_BYTES * model.parameters_per_rank)


def room_bytes(free: int, activation_bytes: int) -> int:
    """Return the room in free memory; 0 if it is not known, at least 1 if it is. free: 0 if it is not known.

    `activationBytes` is a maximum that few micro-batches reach, so at most half of the free memory is kept for it.
    """
    return 0 if free == 0 else max(1, int(USABLE * (free - min(activation_bytes, free // 2))))


def memory_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory limit of this container in bytes; None if it has none, as on one machine with other processes."""
    for name in _LIMITS:
        try:
            text = (cgroup / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return None
