"""The proven versions in the engine's slots, and the requests that run on them or wait for them. No engine and no I/O.

A request waits for its version here (`ProvenVersions.queue`), and holds it while it runs (`ProvenVersions.hold`). `paging`
decides which versions are loaded and evicted, and `versions` does it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from marlaas_api.errors import Permanent
from marlaas_api.messages import Manifest
from marlaas_api.names import AdapterRef, AgentRef
from marlaas_worker.rollout.engine import LoadedAdapter
from marlaas_worker.rollout.paging import Wait
from marlaas_worker.rollout.slot_table import SlotTable


def is_of(name: str, uids: Collection[str]) -> bool:
    """Return whether the engine name of a version is of one of these jobs."""
    return any(f".{uid}." in name for uid in uids)


class VersionRefused(Permanent):
    """A version that failed its proof or that the engine refused; it is never served."""


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

    @property
    def num_requests(self) -> int:
        """Requests that wait for a version."""
        return sum(waiting.num for waiting in self._waiting.values())

    def adapter(self, name: str) -> AdapterRef:
        """Return the version of a wait."""
        return self._waiting[name].adapter

    async def wait(self, adapter: AdapterRef, tenant: str) -> None:
        """Return when the version is settled: served or refused."""
        name = adapter.engine_name
        waiting = self._waiting.get(name)
        if waiting is None:
            waiting = self._waiting[name] = _WaitingRequests(adapter, Wait(name, tenant, time.monotonic()))
            self._joined()
        waiting.num += 1
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


CALLED_S = 60.0
"""A past version may be called again for so long after its last call. Longer than nearly all tool calls."""


class PastCalls:
    """Versions that an open step or evaluation may call again although newer ones were committed. Known from the pins of requests.

    These are the versions of agents that play past versions, one for each open step, and the version of an evaluation.
    The end of a step or evaluation is not known here: a later version of the same caller ends an earlier one, and so does time.
    """

    def __init__(self) -> None:
        self._called_at: dict[AgentRef, dict[str, dict[int, float]]] = {}

    def note(self, adapter: AdapterRef, caller: str, num_open: int, now: float) -> None:
        """Record a call. caller: the agent, or the evaluation. num_open: most versions that it calls at a time."""
        called_at = self._called_at.setdefault(adapter.agent_ref, {}).setdefault(caller, {})
        called_at.pop(adapter.version, None)
        called_at[adapter.version] = now
        while len(called_at) > num_open:
            del called_at[next(iter(called_at))]

    def may_call(self, adapter: AdapterRef, now: float) -> bool:
        """Return whether a version may be called again."""
        callers = self._called_at.get(adapter.agent_ref, {}).values()
        return any(now - called_at.get(adapter.version, -CALLED_S) < CALLED_S for called_at in callers)

    def keep(self, agents: Collection[AgentRef]) -> None:
        """Drop the calls of all other agents."""
        self._called_at = {agent: calls for agent, calls in self._called_at.items() if agent in agents}


@dataclass(frozen=True, slots=True)
class Held:
    """A proven version while a request runs on it."""

    loaded: LoadedAdapter
    manifest: Manifest


class ProvenVersions:
    """The versions that requests may use now, and the requests that wait for others.

    Attributes:
        table: the slots.
        waits: requests that wait for a version.
        newest: the newest committed version of every served agent.
        strict: the agents of strict jobs.
        past: calls of versions that may be past.
        is_short: whether a version that requests wait for, or will soon, has no slot.
        elsewhere: the agents whose requests go to other replicas; their versions are loaded on request only.
        wake: set when a request or a new version needs a change of the slots.
    """

    def __init__(self, num_slots: int, numbers: Iterator[int]) -> None:
        self.wake = asyncio.Event()
        self.table = SlotTable(num_slots, numbers)
        self.waits = Waits(self.wake.set)
        self.newest: dict[AgentRef, AdapterRef] = {}
        self.strict: frozenset[AgentRef] = frozenset()
        self.past = PastCalls()
        self.is_short = False
        self.elsewhere: frozenset[AgentRef] = frozenset()
        self._proven: dict[str, Held] = {}
        self._versions: dict[AgentRef, set[int]] = {}
        self._served: dict[AgentRef, set[int]] = {}
        self._tenants: dict[AgentRef, str] = {}
        self._refused: dict[str, Exception] = {}
        self._yielding: frozenset[str] = frozenset()
        self._revoked: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        """Engine names of the versions that may be served now."""
        return tuple(self._proven)

    def was_proven(self, adapter: AdapterRef) -> bool:
        """Return whether the version passed all checks in this incarnation of the engine, even if it was evicted since."""
        return adapter.version in self._versions.get(adapter.agent_ref, ())

    def has_served(self, adapter: AdapterRef) -> bool:
        """Return whether a request has run on the version in this incarnation of the engine."""
        return adapter.version in self._served.get(adapter.agent_ref, ())

    def is_yielding(self, name: str) -> bool:
        """Return whether a version takes no new requests for now."""
        return name in self._yielding

    def tenant_of(self, adapter: AdapterRef) -> str:
        """Return the tenant of a version's agent; empty before the agent's first request."""
        return self._tenants.get(adapter.agent_ref, "")

    @asynccontextmanager
    async def queue(self, adapter: AdapterRef, tenant: str) -> AsyncIterator[None]:
        """Wait until a version is served. The request waits for a place in the engine while the context is open.

        Then it has to `hold` the version, which may have lost its slot meanwhile. Raises VersionRefused.
        """
        name = adapter.engine_name
        self._tenants[adapter.agent_ref] = tenant
        while True:
            self._raise_refusal(name)
            if name in self._proven and name not in self._yielding:
                break
            await self.waits.wait(adapter, tenant)
        with self.table.queued(self._proven[name].loaded):
            yield

    @contextmanager
    def hold(self, adapter: AdapterRef) -> Iterator[Held | None]:
        """Prevent a version's unloading while the context is open; None if it has to be waited for (`queue`)."""
        name = adapter.engine_name
        if name in self._revoked or self.table.acquire(name) is None:
            yield None
            return
        held = self._proven[name]
        self._served.setdefault(adapter.agent_ref, set()).add(adapter.version)
        try:
            yield held
        finally:
            self.table.release(held.loaded)
            is_needed = bool(self.waits) or self.is_short or name in self._yielding
            if is_needed and not self.table.running(name):
                self.wake.set()

    def newest_resident(self, agent: AgentRef) -> int:
        """Return the newest version of an agent that may be served now, without a load; -1 if there is none."""
        adapters = (held.manifest.adapter for held in self._proven.values())
        return max((adapter.version for adapter in adapters if adapter.agent_ref == agent), default=-1)

    async def newest_of(self, agent: AgentRef, tenant: str, max_staleness: int) -> int:
        """Return the newest proven version of an agent; wait for the newest one if all are too old. Raises VersionRefused.

        An evicted version counts too; it is loaded again when a request needs it. After a restart of the engine, a past
        version may be the first that is proven: a group that is sampled from it would be dropped as stale.

        Args:
            max_staleness: most versions behind the newest one.
        """
        while True:
            best = max(self.newest_resident(agent), *self._versions.get(agent, ()), -1)
            newest = self.newest.get(agent)
            if best >= 0 and (newest is None or best >= newest.version - max_staleness):
                return best
            if newest is None:
                await self._changed.wait()
            else:
                self._raise_refusal(newest.engine_name)
                await self.waits.wait(newest, tenant)

    def prefer(self, newest: Iterable[AdapterRef], strict: Iterable[AgentRef] = ()) -> None:
        """Set the newest version of every served agent, and the agents of strict jobs."""
        self.newest = {adapter.agent_ref: adapter for adapter in newest}
        self.strict = frozenset(strict)
        self.past.keep(self.newest.keys())
        for known in (self._versions, self._served, self._tenants):
            for agent in known.keys() - self.newest.keys():
                del known[agent]
        self.wake.set()
        self._settle()

    def add(self, held: Held) -> None:
        """Give a version that was loaded and proven to its requests."""
        self.table.ready(held.loaded)
        self._proven[held.loaded.name] = held
        adapter = held.manifest.adapter
        self._versions.setdefault(adapter.agent_ref, set()).add(adapter.version)
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
        self._served.clear()
        self._refused.clear()
        self._yielding = self._revoked = frozenset()

    def yield_slots(self, yielding: frozenset[str], revoked: frozenset[str] = frozenset()) -> None:
        """Set the versions that take no new requests for now, and wake the requests of the others.

        revoked: those of them that do not serve the requests in the engine's queue either.
        """
        self._yielding, self._revoked = yielding, revoked
        for wait in self.waits:
            if wait.name in self._proven and wait.name not in yielding:
                self._settle(wait.name)

    def _raise_refusal(self, name: str) -> None:
        if (refusal := self._refused.get(name)) is not None:
            raise VersionRefused(f"{name} is refused: {refusal}") from refusal

    def _settle(self, *names: str) -> None:
        for name in names:
            self.waits.settle(name)
        self._changed.set()
        self._changed = asyncio.Event()
