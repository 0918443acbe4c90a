"""The engine's adapter slots, as the rollout role sees them. No engine and no I/O.

Invariants: never more versions than slots; a version in use is never evicted; a slot number is never reused, so each load
of a version has its own number.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed
from marlaas_worker.rollout.paging import Resident


class NoFreeSlot(LoadFailed):
    """All slots are taken, or the version has a slot already."""


@dataclass(slots=True)
class _Slot:
    adapter: LoadedAdapter
    loaded_at: float
    used_at: float
    running: int = 0
    queued: int = 0
    ready: bool = False


class SlotTable:
    """The rollout role's view of its engine's slots. A version is loading, then ready; requests run on it while acquired.

    numbers: source of slot numbers, if it is shared with another user of the same engine.
    """

    def __init__(self, num_slots: int, numbers: Iterator[int] | None = None) -> None:
        self.num_slots = num_slots
        self._slots: dict[str, _Slot] = {}
        self._ids = count(1) if numbers is None else numbers

    def begin(self, name: str, folder: Path) -> LoadedAdapter:
        """Take a slot for a version before its load. Raises NoFreeSlot."""
        if name in self._slots:
            raise NoFreeSlot(f"{name} has a slot already")
        if len(self._slots) >= self.num_slots:
            raise NoFreeSlot(f"all {self.num_slots} adapter slots are taken")
        adapter = LoadedAdapter(name, next(self._ids), folder)
        now = time.monotonic()
        self._slots[name] = _Slot(adapter, now, now)
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
        slot.used_at = time.monotonic()
        return slot.adapter

    def release(self, adapter: LoadedAdapter) -> None:
        """End a request; does nothing if the engine was restarted meanwhile."""
        slot = self._slots.get(adapter.name)
        if slot is not None and slot.adapter == adapter and slot.running:
            slot.running -= 1
            slot.used_at = time.monotonic()

    @contextmanager
    def queued(self, adapter: LoadedAdapter) -> Iterator[None]:
        """Count a request that waits for a place in the engine. It does not prevent the removal of the version."""
        slot = self._slots[adapter.name]
        slot.queued += 1
        try:
            yield
        finally:
            slot.queued -= 1
            slot.used_at = time.monotonic()

    def residents(self) -> list[Resident]:
        """Return the versions that have a slot, for `paging`."""
        return [
            Resident(name, slot.loaded_at, slot.used_at, slot.running, slot.queued, slot.ready)
            for name, slot in self._slots.items()
        ]

    @property
    def num_running(self) -> int:
        """Requests that run on any version."""
        return sum(slot.running for slot in self._slots.values())

    def loaded(self, name: str) -> LoadedAdapter:
        """Return the load of a resident version."""
        return self._slots[name].adapter

    def running(self, name: str) -> int:
        """Return the number of requests that run on a version."""
        return self._slots[name].running if name in self._slots else 0
