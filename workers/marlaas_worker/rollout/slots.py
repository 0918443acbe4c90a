"""The engine's adapter slots: the proven versions that they hold, and the requests that run on them or wait for them.

A request holds its version here (`ProvenVersions.hold`); `paging` decides which versions are loaded and evicted, and
`versions` does it. No engine and no I/O. Invariants: never more versions than slots; a version in use is never evicted; a slot number is
never reused, so each load of a version has its own number.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from marlaas_api.errors import Permanent
from marlaas_api.messages import Manifest
from marlaas_api.names import AdapterRef
from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed
from marlaas_worker.rollout.paging import Resident, Wait


def is_of(name: str, uids: Collection[str]) -> bool:
    """Return whether the engine name of a version is of one of these jobs."""
    return any(f".{uid}." in name for uid in uids)


class NoFreeSlot(LoadFailed):
    """Every slot holds a version that is in use, or one that has higher urgency."""


class VersionRefused(Permanent):
    """A version that failed its proof or that the engine refused; it is never served."""


@dataclass(slots=True)
class _Slot:
    adapter: LoadedAdapter
    loaded_at: float
    used_at: float
    running: int = 0
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

    def residents(self) -> list[Resident]:
        """Return the versions that have a slot, for `paging`."""
        return [
            Resident(name, slot.loaded_at, slot.used_at, slot.running, slot.ready) for name, slot in self._slots.items()
        ]

    def loaded(self, name: str) -> LoadedAdapter:
        """Return the load of a resident version."""
        return self._slots[name].adapter

    def running(self, name: str) -> int:
        """Return the number of requests that run on a version."""
        return self._slots[name].running if name in self._slots else 0


@dataclass(slots=True)
class _WaitingRequests:
    """All requests that wait for one version. num: their number."""

    adapter: AdapterRef
    wait: Wait
    num: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Waits:
    """Versions that requests wait for, in order of the first request. `joined` is called for each new wait."""

    def __init__(self, joined: Callable[[], None]) -> None:
        self._joined = joined
        self._waiting: dict[str, _WaitingRequests] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Wait]:
        return iter([waiting.wait for waiting in self._waiting.values()])

    def adapter(self, name: str) -> AdapterRef:
        """Return the version of a wait."""
        return self._waiting[name].adapter

    async def wait(self, adapter: AdapterRef, tenant: str) -> None:
        """Return when the version is settled: served or refused."""
        name = adapter.engine_name
        waiting = self._waiting.get(name)
        if waiting is None:
            waiting = self._waiting[name] = _WaitingRequests(adapter, Wait(name, tenant, time.monotonic()))
        waiting.num += 1
        self._joined()
        try:
            await waiting.settled.wait()
        finally:
            waiting.num -= 1
            if not waiting.num and self._waiting.get(name) is waiting:
                del self._waiting[name]

    def settle(self, name: str) -> None:
        """Wake the requests that wait for a version, so that they check it again."""
        waiting = self._waiting.pop(name, None)
        if waiting:
            waiting.settled.set()


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
        strict: the agents, as version 0, of jobs whose groups are all sampled from the newest version.
        elsewhere: the agents, as version 0, whose requests go to other replicas; their versions are loaded on request only.
        wake: set when a request or a new version needs a change of the slots.
    """

    def __init__(self, num_slots: int, numbers: Iterator[int]) -> None:
        self.wake = asyncio.Event()
        self.table = SlotTable(num_slots, numbers)
        self.waits = Waits(self.wake.set)
        self.newest: dict[AdapterRef, AdapterRef] = {}
        self.strict: frozenset[AdapterRef] = frozenset()
        self.elsewhere: frozenset[AdapterRef] = frozenset()
        self._proven: dict[str, Held] = {}
        self._versions: dict[AdapterRef, set[int]] = {}
        self._refused: dict[str, Exception] = {}
        self._yielding: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        """Engine names of the versions that may be served now."""
        return tuple(self._proven)

    def was_proven(self, adapter: AdapterRef) -> bool:
        """Return whether the version passed all checks in this incarnation of the engine, even if it was evicted since."""
        return adapter.version in self._versions.get(adapter.at(0), ())

    @asynccontextmanager
    async def hold(self, adapter: AdapterRef, tenant: str) -> AsyncIterator[Held]:
        """Wait for a proven version, and prevent its unloading while the context is open. Raises VersionRefused."""
        held = await self._acquire(adapter, tenant)
        try:
            yield held
        finally:
            self.table.release(held.loaded)
            is_needed = bool(self.waits) or held.loaded.name in self._yielding
            if is_needed and not self.table.running(held.loaded.name):
                self.wake.set()

    async def newest_of(self, agent: AdapterRef, tenant: str) -> int:
        """Return the newest proven version of an agent; wait for the first one. Raises VersionRefused.

        An evicted version counts too; it is loaded again when a request needs it.

        agent: an adapter of the agent at any version.
        """
        while True:
            adapters = (held.manifest.adapter for held in self._proven.values())
            resident = {adapter.version for adapter in adapters if adapter.at(0) == agent.at(0)}
            if proven := resident | self._versions.get(agent.at(0), set()):
                return max(proven)
            newest = self.newest.get(agent.at(0))
            if newest is None:
                await self._changed.wait()
            else:
                self._raise_refusal(newest.engine_name)
                await self.waits.wait(newest, tenant)

    def prefer(self, newest: Iterable[AdapterRef], strict: Iterable[AdapterRef] = ()) -> None:
        """Set the newest version of every served agent, and the agents of strict jobs."""
        self.newest = {adapter.at(0): adapter for adapter in newest}
        self.strict = frozenset(adapter.at(0) for adapter in strict)
        for agent in self._versions.keys() - self.newest.keys():
            del self._versions[agent]
        self.wake.set()
        self._settle()

    def add(self, held: Held) -> None:
        """Give a version that was loaded and proven to its requests."""
        self.table.ready(held.loaded)
        self._proven[held.loaded.name] = held
        adapter = held.manifest.adapter
        self._versions.setdefault(adapter.at(0), set()).add(adapter.version)
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

    def forget(self, uids: Collection[str]) -> None:
        """Forget the refusals of jobs that are gone."""
        self._refused = {name: error for name, error in self._refused.items() if not is_of(name, uids)}

    def clear(self) -> None:
        """Remove all versions and refusals, after the engine has stopped."""
        self.table.clear()
        self._proven.clear()
        self._versions.clear()
        self._refused.clear()
        self._yielding = frozenset()

    def yield_slots(self, yielding: frozenset[str]) -> None:
        """Set the versions that take no new requests for now, and wake the requests of the others."""
        self._yielding = yielding
        for wait in self.waits:
            if wait.name in self._proven and wait.name not in yielding:
                self._settle(wait.name)

    async def _acquire(self, adapter: AdapterRef, tenant: str) -> Held:
        name = adapter.engine_name
        while True:
            self._raise_refusal(name)
            if name not in self._yielding and self.table.acquire(name) is not None:
                return self._proven[name]
            await self.waits.wait(adapter, tenant)

    def _raise_refusal(self, name: str) -> None:
        if (refusal := self._refused.get(name)) is not None:
            raise VersionRefused(f"{name} is refused: {refusal}") from refusal

    def _settle(self, *names: str) -> None:
        for name in names:
            self.waits.settle(name)
        self._changed.set()
        self._changed = asyncio.Event()
