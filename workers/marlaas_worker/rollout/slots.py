"""Slot bookkeeping: which adapter versions an engine holds, which are in use, and which to evict for others.

Pure: no engine, no clock, no I/O. Invariants: never more versions than slots; a version in use is never
evicted; a slot number is never reused, so each load of a version has its own number.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed


class NoFreeSlot(LoadFailed):
    """Every slot holds a version that is in use, or one that has higher urgency."""


@dataclass(slots=True)
class _Slot:
    adapter: LoadedAdapter
    used_at: int
    running: int = 0
    ready: bool = False


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The next actions, in this order: unload the adapters in `unload`, then load the versions named in `load`."""

    unload: tuple[LoadedAdapter, ...]
    load: tuple[str, ...]


class SlotTable:
    """The rollout role's view of its engine's slots.

    A version is loading, then ready; requests run on it while acquired.

    numbers: source of slot numbers, if it is shared with another user of the same engine.
    """

    def __init__(self, num_slots: int, numbers: Iterator[int] | None = None) -> None:
        self.num_slots = num_slots
        self._slots: dict[str, _Slot] = {}
        self._ids = count(1) if numbers is None else numbers
        self._ticks = count(1)

    def plan(self, wanted: Iterable[str]) -> SlotPlan:
        """Plan the unloads and loads that make the wanted versions resident.

        A version that is in use or loading stays. If the wanted versions do not fit, the least urgent are left
        out. A version that is not wanted is evicted only if its slot is needed, the least recently used first.

        Args:
            wanted: in order of urgency: versions in use and pinned ones, then the newest.
        """
        urgent = list(dict.fromkeys(wanted))
        busy = [name for name, slot in self._slots.items() if slot.running or not slot.ready]
        kept = set(busy) | set([name for name in urgent if name not in busy][: self.num_slots - len(busy)])
        load = tuple(name for name in urgent if name in kept and name not in self._slots)
        spare = sorted(self._slots.keys() - kept, key=lambda name: self._slots[name].used_at)
        excess = max(0, len(self._slots) + len(load) - self.num_slots)
        return SlotPlan(tuple(self._slots[name].adapter for name in spare[:excess]), load)

    def begin(self, name: str, folder: Path) -> LoadedAdapter:
        """Take a slot for a version before its load. Raises NoFreeSlot."""
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
        """Remove a version that was unloaded, or whose load failed. Raises LoadFailed while it is in use."""
        slot = self._slots.get(adapter.name)
        if slot is not None and slot.running:
            raise LoadFailed(f"{adapter.name} still runs {slot.running} requests")
        self._slots.pop(adapter.name, None)

    def clear(self) -> None:
        """Remove all versions, after an engine restart. Slot numbers continue."""
        self._slots.clear()

    def acquire(self, name: str) -> LoadedAdapter | None:
        """Begin a request on a version; None if the version is not ready."""
        slot = self._slots.get(name)
        if slot is None or not slot.ready:
            return None
        slot.running += 1
        slot.used_at = next(self._ticks)
        return slot.adapter

    def release(self, adapter: LoadedAdapter) -> None:
        """End a request; does nothing if the engine was restarted meanwhile."""
        slot = self._slots.get(adapter.name)
        if slot is not None and slot.adapter == adapter and slot.running:
            slot.running -= 1

    @property
    def resident(self) -> tuple[str, ...]:
        """Names of the versions that have a slot, including those that are loading."""
        return tuple(self._slots)

    @property
    def verified(self) -> tuple[str, ...]:
        """Names of the versions that requests may use."""
        return tuple(name for name, slot in self._slots.items() if slot.ready)

    def running(self, name: str) -> int:
        """Return the number of requests that run on a version."""
        return self._slots[name].running if name in self._slots else 0


@dataclass(slots=True)
class Residents:
    """The engine's own slot bookkeeping: checks every call, independent of the role's `SlotTable`."""

    num_slots: int
    _held: dict[int, LoadedAdapter] = field(default_factory=dict)
    _running: dict[int, int] = field(default_factory=dict)
    _past: set[int] = field(default_factory=set)

    def admit(self, adapter: LoadedAdapter) -> None:
        """Note an adapter before its load.

        Raises LoadFailed if all slots are taken, the name is loaded, or the number was used before.
        """
        if len(self._held) >= self.num_slots:
            raise LoadFailed(f"all {self.num_slots} adapter slots are taken")
        if any(held.name == adapter.name for held in self._held.values()):
            raise LoadFailed(f"{adapter.name} is loaded already")
        if adapter.slot_id < 1 or adapter.slot_id in self._past:
            raise LoadFailed(f"{adapter.name}: slot number {adapter.slot_id} was used before")
        self._past.add(adapter.slot_id)
        self._held[adapter.slot_id] = adapter

    def remove(self, adapter: LoadedAdapter) -> bool:
        """Remove an adapter; return False if it was not loaded. Raises LoadFailed while it is in use."""
        if self._running.get(adapter.slot_id):
            raise LoadFailed(f"{adapter.name} still runs {self._running[adapter.slot_id]} requests")
        held = self._held.get(adapter.slot_id) == adapter
        if held:
            del self._held[adapter.slot_id]
        return held

    def require(self, adapter: LoadedAdapter) -> None:
        """Raise LoadFailed unless exactly this adapter is loaded."""
        if self._held.get(adapter.slot_id) != adapter:
            raise LoadFailed(f"{adapter.name} is not loaded in this engine")

    @contextmanager
    def using(self, adapter: LoadedAdapter) -> Iterator[None]:
        """Prevent an adapter's removal while the context is open. Raises LoadFailed unless it is loaded."""
        self.require(adapter)
        self._running[adapter.slot_id] = self._running.get(adapter.slot_id, 0) + 1
        try:
            yield
        finally:
            if adapter.slot_id in self._running:
                self._running[adapter.slot_id] -= 1

    def clear(self) -> None:
        """Remove all adapters, after the engine has stopped."""
        self._held.clear()
        self._running.clear()
