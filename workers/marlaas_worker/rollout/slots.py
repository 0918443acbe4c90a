"""The engine's adapter slots: the proven versions that they hold, and the requests that run on them or wait for them.

A request holds its version here (`ProvenVersions.hold`); `versions` decides which versions are loaded and evicted.
No engine and no I/O. Invariants: never more versions than slots; a version in use is never evicted; a slot number is
never reused, so each load of a version has its own number.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from marlaas_api.errors import Permanent
from marlaas_api.messages import Manifest
from marlaas_api.names import AdapterRef
from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed


class NoFreeSlot(LoadFailed):
    """Every slot holds a version that is in use, or one that has higher urgency."""


class VersionRefused(Permanent):
    """A version that failed its proof or that the engine refused; it is never served."""


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

    def running(self, name: str) -> int:
        """Return the number of requests that run on a version."""
        return self._slots[name].running if name in self._slots else 0


@dataclass(slots=True)
class _Wait:
    """All requests that wait for one version. num: their number."""

    adapter: AdapterRef
    num: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Waits:
    """Versions that requests wait for, in order of the first request. `joined` is called for each new wait."""

    def __init__(self, joined: Callable[[], None]) -> None:
        self._joined = joined
        self._waits: dict[str, _Wait] = {}

    def __bool__(self) -> bool:
        return bool(self._waits)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._waits))

    def adapters(self) -> list[AdapterRef]:
        """Return the versions that requests wait for."""
        return [wait.adapter for wait in self._waits.values()]

    async def wait(self, adapter: AdapterRef) -> None:
        """Return when the version is settled: served or refused."""
        name = adapter.engine_name
        wait = self._waits.setdefault(name, _Wait(adapter))
        wait.num += 1
        self._joined()
        try:
            await wait.settled.wait()
        finally:
            wait.num -= 1
            if not wait.num and self._waits.get(name) is wait:
                del self._waits[name]

    def settle(self, name: str) -> None:
        """Wake the requests that wait for a version, so that they check it again."""
        wait = self._waits.pop(name, None)
        if wait is not None:
            wait.settled.set()


def to_yield(running: Iterable[str], resident: Iterable[str], waiting: Iterable[str]) -> frozenset[str]:
    """Choose running versions that take no new requests for now: one for each waiting version without a slot.

    The versions that have been served longest come first. Otherwise a version that always has requests would
    never free its slot.
    """
    have = set(resident)
    missing = sum(name not in have for name in waiting)
    return frozenset(list(running)[:missing])


@dataclass(frozen=True, slots=True)
class Held:
    """A proven version while a request runs on it. incarnation: the engine incarnation in which it was proven."""

    loaded: LoadedAdapter
    manifest: Manifest
    incarnation: int


class ProvenVersions:
    """The versions that requests may use now, and the requests that wait for others.

    Attributes:
        table: the slots.
        waits: requests that wait for a version.
        newest: the newest committed version of every served agent, by the agent's version 0.
        wake: set when a request or a new version needs a change of the slots.
    """

    def __init__(self, num_slots: int, numbers: Iterator[int]) -> None:
        self.wake = asyncio.Event()
        self.table = SlotTable(num_slots, numbers)
        self.waits = Waits(self.wake.set)
        self.newest: dict[AdapterRef, AdapterRef] = {}
        self._proven: dict[str, Held] = {}
        self._refused: dict[str, Exception] = {}
        self._yielding: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        """Engine names of the versions that may be served now."""
        return tuple(self._proven)

    @asynccontextmanager
    async def hold(self, adapter: AdapterRef) -> AsyncIterator[Held]:
        """Wait for a proven version, and prevent its unloading while the context is open. Raises VersionRefused."""
        held = await self._acquire(adapter)
        try:
            yield held
        finally:
            self.table.release(held.loaded)
            if self.waits:
                self.wake.set()

    async def newest_of(self, agent: AdapterRef) -> int:
        """Return the newest proven version of an agent; wait for the first one. Raises VersionRefused.

        agent: an adapter of the agent at any version.
        """
        while True:
            adapters = (held.manifest.adapter for held in self._proven.values())
            proven = [adapter.version for adapter in adapters if adapter.at(0) == agent.at(0)]
            if proven:
                return max(proven)
            newest = self.newest.get(agent.at(0))
            if newest is None:
                await self._changed.wait()
            else:
                self._raise_refusal(newest.engine_name)
                await self.waits.wait(newest)

    def prefer(self, newest: Iterable[AdapterRef]) -> None:
        """Set the newest version of every served agent."""
        self.newest = {adapter.at(0): adapter for adapter in newest}
        self.wake.set()
        self._settle()

    def add(self, held: Held) -> None:
        """Give a version that was loaded and proven to its requests."""
        self.table.ready(held.loaded)
        self._proven[held.loaded.name] = held
        self._settle(held.loaded.name)
        self.wake.set()

    def remove(self, loaded: LoadedAdapter) -> None:
        """Stop giving a version to requests, and free its slot. Raises LoadFailed while it is in use."""
        self.table.drop(loaded)
        self._proven.pop(loaded.name, None)

    def refuse(self, name: str, error: Exception) -> None:
        """Fail the requests for a version, now and in future."""
        self._refused[name] = error
        self._settle(name)

    def clear(self) -> None:
        """Remove all versions and refusals, after the engine has stopped."""
        self.table.clear()
        self._proven.clear()
        self._refused.clear()
        self._yielding = frozenset()

    def share_slots(self) -> None:
        """Choose the versions that yield their slots to waiting ones, and wake the requests that may run."""
        running = [name for name in self._proven if self.table.running(name)]
        self._yielding = to_yield(running, self.table.resident, self.waits)
        for name in self.waits:
            if name in self._proven and name not in self._yielding:
                self._settle(name)

    async def _acquire(self, adapter: AdapterRef) -> Held:
        name = adapter.engine_name
        while True:
            self._raise_refusal(name)
            if name not in self._yielding and self.table.acquire(name) is not None:
                return self._proven[name]
            await self.waits.wait(adapter)

    def _raise_refusal(self, name: str) -> None:
        if (refusal := self._refused.get(name)) is not None:
            raise VersionRefused(f"{name} is refused: {refusal}") from refusal

    def _settle(self, *names: str) -> None:
        for name in names:
            self.waits.settle(name)
        self._changed.set()
        self._changed = asyncio.Event()
