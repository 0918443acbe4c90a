"""Slot bookkeeping: which adapter versions an engine holds, which of them run, and what has to go so that others can come.

Pure: no engine, no clock, no I/O. Invariants: never more versions than slots; a version in use is never given up; a slot's
number is never used twice, so a version that comes back is told apart from its earlier stay.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed


class NoFreeSlot(LoadFailed):
    """Every slot holds a version that runs, or one that was asked for more urgently."""


@dataclass(slots=True)
class _Slot:
    adapter: LoadedAdapter
    used_at: int
    running: int = 0
    ready: bool = False


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """What to do next, in this order: give up the adapters of `unload`, then bring in the versions named by `load`."""

    unload: tuple[LoadedAdapter, ...]
    load: tuple[str, ...]


class SlotTable:
    """What the rollout role knows of its engine's slots. A version is loading, then ready, and runs requests while acquired.

    numbers: where slot numbers come from, if others number slots of the same engine too.
    """

    def __init__(self, num_slots: int, numbers: Iterator[int] | None = None) -> None:
        self.num_slots = num_slots
        self._slots: dict[str, _Slot] = {}
        self._ids = count(1) if numbers is None else numbers
        self._ticks = count(1)

    def plan(self, wanted: Iterable[str]) -> SlotPlan:
        """Say how to make the wanted versions resident; `wanted` is in order of urgency (running and pinned ones, then newest).

        What is in use or loading stays. What does not fit is left out, the least urgent first; what is not wanted goes only if its
        slot is needed, the least recently used first.
        """
        urgent = list(dict.fromkeys(wanted))
        busy = [name for name, slot in self._slots.items() if slot.running or not slot.ready]
        kept = set(busy) | set([name for name in urgent if name not in busy][: self.num_slots - len(busy)])
        load = tuple(name for name in urgent if name in kept and name not in self._slots)
        spare = sorted(self._slots.keys() - kept, key=lambda name: self._slots[name].used_at)
        excess = max(0, len(self._slots) + len(load) - self.num_slots)
        return SlotPlan(tuple(self._slots[name].adapter for name in spare[:excess]), load)

    def begin(self, name: str, folder: Path) -> LoadedAdapter:
        """Take a slot for a version that is about to be loaded. Raises NoFreeSlot."""
        if name in self._slots:
            raise NoFreeSlot(f"{name} has a slot already")
        if len(self._slots) >= self.num_slots:
            raise NoFreeSlot(f"all {self.num_slots} adapter slots are taken")
        adapter = LoadedAdapter(name, next(self._ids), folder)
        self._slots[name] = _Slot(adapter, next(self._ticks))
        return adapter

    def ready(self, adapter: LoadedAdapter) -> None:
        """Note that a version was loaded and proven: requests may use it."""
        self._slots[adapter.name].ready = True

    def drop(self, adapter: LoadedAdapter) -> None:
        """Forget a version that was unloaded, or whose load failed. Raises LoadFailed while it runs."""
        slot = self._slots.get(adapter.name)
        if slot is not None and slot.running:
            raise LoadFailed(f"{adapter.name} still runs {slot.running} requests")
        self._slots.pop(adapter.name, None)

    def clear(self) -> None:
        """Forget everything: the engine was restarted. Numbers go on from where they were."""
        self._slots.clear()

    def acquire(self, name: str) -> LoadedAdapter | None:
        """Begin a request; None if the version is not ready."""
        slot = self._slots.get(name)
        if slot is None or not slot.ready:
            return None
        slot.running += 1
        slot.used_at = next(self._ticks)
        return slot.adapter

    def release(self, adapter: LoadedAdapter) -> None:
        """End a request; nothing happens if the engine was restarted meanwhile."""
        slot = self._slots.get(adapter.name)
        if slot is not None and slot.adapter == adapter and slot.running:
            slot.running -= 1

    @property
    def resident(self) -> tuple[str, ...]:
        """Names that have a slot, loading ones too."""
        return tuple(self._slots)

    @property
    def verified(self) -> tuple[str, ...]:
        """Names that requests may use."""
        return tuple(name for name, slot in self._slots.items() if slot.ready)

    def running(self, name: str) -> int:
        """Requests under way on a version."""
        return self._slots[name].running if name in self._slots else 0


@dataclass(slots=True)
class Residents:
    """An engine's own side of it: the last line of defence, whatever the role above believes."""

    num_slots: int
    _held: dict[int, LoadedAdapter] = field(default_factory=dict)
    _running: dict[int, int] = field(default_factory=dict)
    _past: set[int] = field(default_factory=set)

    def admit(self, adapter: LoadedAdapter) -> None:
        """Note an adapter that is being loaded. Raises LoadFailed: no room, name held already, number used before."""
        if len(self._held) >= self.num_slots:
            raise LoadFailed(f"all {self.num_slots} adapter slots are taken")
        if any(held.name == adapter.name for held in self._held.values()):
            raise LoadFailed(f"{adapter.name} is loaded already")
        if adapter.slot_id < 1 or adapter.slot_id in self._past:
            raise LoadFailed(f"{adapter.name}: slot number {adapter.slot_id} was used before")
        self._past.add(adapter.slot_id)
        self._held[adapter.slot_id] = adapter

    def remove(self, adapter: LoadedAdapter) -> bool:
        """Forget an adapter; False if it was not there. Raises LoadFailed while it is used."""
        if self._running.get(adapter.slot_id):
            raise LoadFailed(f"{adapter.name} still runs {self._running[adapter.slot_id]} requests")
        held = self._held.get(adapter.slot_id) == adapter
        if held:
            del self._held[adapter.slot_id]
        return held

    def require(self, adapter: LoadedAdapter) -> None:
        """Raise LoadFailed unless exactly this adapter is held."""
        if self._held.get(adapter.slot_id) != adapter:
            raise LoadFailed(f"{adapter.name} is not loaded in this engine")

    @contextmanager
    def using(self, adapter: LoadedAdapter) -> Iterator[None]:
        """Keep an adapter from being removed. Raises LoadFailed unless it is held."""
        self.require(adapter)
        self._running[adapter.slot_id] = self._running.get(adapter.slot_id, 0) + 1
        try:
            yield
        finally:
            if adapter.slot_id in self._running:
                self._running[adapter.slot_id] -= 1

    def clear(self) -> None:
        """Forget what the engine held, because it is gone."""
        self._held.clear()
        self._running.clear()
