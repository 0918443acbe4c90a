"""A trainer's memory for agents: its size, and which agents are in it, where more are admitted than fit.

An agent needs room for its adapter, gradient and moments while it trains. When another one waits for room, agents are
asked to leave (they are *parked*); a parked agent's state is its committed version in the blob store, from which it is
restored exactly when its next group arrives. `AgentRoom` decides this, purely: callbacks wake the agents.

- An agent that waits goes first if its step is closed and all groups are there (it is *due*), then in order of arrival.
- Asked to leave, least recently entered first: agents without work between two steps; agents between two steps that have
  been here for QUANTUM_S; and only for a due agent, agents that wait for groups within a step. They begin that step again.

No deadlock: a due agent needs nothing but room, and every other one may have to leave for it. No endless exchange: a step is
begun again only for an agent that then commits one.

The memory holds adapters, gradients, optimizer moments and KL references, all in float32. The orchestrator admits jobs whose agents need
at most `capacity.AGENTS_PER_PLACE` times its size (`ReplicaReport.agent_room_bytes`).

Under the local runner, whose workers share a machine, the size is the runner's estimate (`PoolDocument.agent_room_bytes`).
Else a trainer measures the memory that is free once the base model is loaded, subtracts the activations, and takes the part `USABLE` of
the rest. On a CPU, the free memory is

- in a container with a limit: what the limit leaves;
- else: `UNLIMITED_PART` of the machine's available memory, since other processes of the machine need memory too.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
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

QUANTUM_S = 1.0
"""Seconds for which an agent with work stays, to amortise its restoring."""
_NUMBER_BYTES = 4
USABLE = 0.8
"""Part of the free memory that agents may have. The rest is for the version that is being published, and fragmentation."""
UNLIMITED_PART = 0.5
CACHE_PART = 0.25
"""Part of the free host memory that `versions.VersionCache` may have if the trainer is on an accelerator."""
_CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_NO_CGROUP_LIMIT = 1 << 60


class Pause(Enum):
    """What an agent that has room does next."""

    BETWEEN_STEPS = auto()
    """It has begun no step, and waits for work."""
    AFTER_STEP = auto()
    """It has begun no step, and has work for the next one."""
    WITHIN_STEP = auto()
    """It waits for groups of a step that it has begun."""
    BUSY = auto()
    """It computes within a step."""


_LAST = (Pause.BETWEEN_STEPS, Pause.AFTER_STEP, Pause.WITHIN_STEP)


@dataclass(slots=True, eq=False)
class _Here:
    """An agent that has room.

    Attributes:
        need: bytes of its room.
        since: time at which it entered, in seconds.
        wake: wakes the agent, so that it calls `pause`.
        pause: what it does next, as it last reported.
        is_asked: whether it was asked to leave.
    """

    need: int
    since: float
    wake: Callable[[], None]
    pause: Pause = Pause.BUSY
    is_asked: bool = False


@dataclass(slots=True, eq=False)
class _Waiting:
    """An agent that waits for room.

    Attributes:
        need: bytes that it waits for.
        wake: wakes the agent, so that it calls `enter` again.
        is_due: whether its step is closed, and all groups of the step have arrived.
    """

    need: int
    wake: Callable[[], None]
    is_due: bool = False


@dataclass(slots=True)
class AgentRoom:
    """The trainer's memory for agents.

    Attributes:
        size: bytes for all agents together; 0 if unknown, and then all agents fit.
        now: returns the time in seconds.
    """

    size: int = 0
    now: Callable[[], float] = time.monotonic
    _here: dict[str, _Here] = field(default_factory=dict)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)

    def enter(self, agent: str, need: int, is_due: bool, wake: Callable[[], None]) -> bool:
        """Give an agent room if it is next and fits; return whether it has room. If not, it waits: call again after `wake`.

        Args:
            agent: its policy key.
            need: bytes; an agent that needs more than the whole room gets all of it.
            is_due: whether its step is closed and all groups of the step have arrived.
            wake: called when the agent can enter, and later when it has to leave.
        """
        if agent in self._here:
            return True
        waiting = self._waiting.setdefault(agent, _Waiting(min(need, self.size), wake))
        waiting.is_due = is_due
        enters = self._next() == agent and waiting.need <= self._free()
        if enters:
            del self._waiting[agent]
            self._here[agent] = _Here(waiting.need, self.now(), wake)
        self._serve()
        return enters

    def pause(self, agent: str, pause: Pause) -> bool:
        """Record what an agent with room does next, before it computes or waits; return whether it has to leave now."""
        here = self._here[agent]
        here.pause = pause
        self._serve()
        if pause is Pause.AFTER_STEP:
            here.pause = Pause.BUSY
        return here.is_asked

    def leave(self, agent: str) -> None:
        """Free the room of an agent; an agent that waits no longer waits. May be repeated."""
        self._waiting.pop(agent, None)
        self._here.pop(agent, None)
        self._serve()

    @property
    def is_shared(self) -> bool:
        """Whether several agents have room, and would leave for an agent that needs the whole room."""
        return self.size > 0 and len(self._here) > 1

    def _free(self) -> int:
        return self.size - sum(one.need for one in self._here.values())

    def _next(self) -> str | None:
        return min(self._waiting, key=lambda name: not self._waiting[name].is_due, default=None)

    def _serve(self) -> None:
        """Wake the first waiting agent if its memory is free; else ask as many agents to leave as it needs and as may be asked (`_may_ask`).

        They leave later: `pause` tells them to, and `leave` calls this again.
        """
        name = self._next()
        if name is None:
            return
        first = self._waiting[name]
        lacking = first.need - self._free()
        if lacking <= 0:
            first.wake()
            return
        lacking -= sum(one.need for one in self._here.values() if one.is_asked)
        may_leave = [one for one in self._here.values() if not one.is_asked and self._may_ask(one, first)]
        for one in sorted(may_leave, key=lambda one: (_LAST.index(one.pause), one.since)):
            if lacking <= 0:
                return
            one.is_asked = True
            lacking -= one.need
            one.wake()

    def _may_ask(self, here: _Here, first: _Waiting) -> bool:
        if here.pause is Pause.AFTER_STEP:
            return self.now() - here.since >= QUANTUM_S
        return here.pause is Pause.BETWEEN_STEPS or (here.pause is Pause.WITHIN_STEP and first.is_due)


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
    if not gc.isenabled():
        gc.collect()  # Garbage of the start, which `process_setup` does not collect, would count as used.
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
    for name in _CGROUP_LIMITS:
        try:
            text = (cgroup / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_CGROUP_LIMIT:
            return int(text)
    return None
