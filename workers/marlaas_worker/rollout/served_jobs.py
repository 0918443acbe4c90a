"""State of the jobs that a replica serves, with their agents: one object per job, dropped as a whole. No I/O.

The caller passes the clock, in seconds.

A job's caches hold values that can be read again from the bus or the blob store, or are not needed for long. Caches of one
kind share a bound in bytes over all jobs.
"""

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from marlaas_api.messages import Manifest
from marlaas_api.names import AgentRef, JobRef
from marlaas_worker.rollout.conversation import Conversation

if TYPE_CHECKING:  # `slots` imports this module.
    from marlaas_worker.rollout.slots import Version

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
GONE_S = 60.0
"""Seconds for which a job's totals are reported after its document is gone, so that the orchestrator reads the last ones."""
RECENT = 64
"""Number of a job's last outputs from which the length of its next ones is estimated."""
CALLED_S = 60.0
"""Seconds after its last request for which a past version counts as one that may be requested again (`ServedAgent.call`).

Longer than nearly all tool calls.
"""


class CacheBound:
    """Bound of the bytes that several caches hold together. Above it, the least recently used values of all these caches are evicted.

    The newest value is kept whatever its size. max_bytes: the bound. num_bytes: sum of the callers' estimates for all values.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._order: OrderedDict[tuple[BoundedCache[Any, Any], Hashable], int] = OrderedDict()

    def use(self, cache: "BoundedCache[K, V]", key: K) -> None:
        """Mark a value as the most recently used one. key: of the value in `cache`."""
        self._order.move_to_end((cache, key))

    def add(self, cache: "BoundedCache[K, V]", key: K, num_bytes: int) -> None:
        """Add the bytes of a new value, and evict the least recently used values of all caches while the sum is above the bound.

        key: of the new value in `cache`. num_bytes: estimated bytes of key and value.
        """
        self._order[cache, key] = num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes and len(self._order) > 1:
            self._evict()

    def remove(self, cache: "BoundedCache[K, V]", key: K) -> None:
        """Subtract the bytes of a value that its cache has dropped."""
        self.num_bytes -= self._order.pop((cache, key))

    def trim(self, is_old: Callable[[Any], bool]) -> None:
        """Evict values, the least recently used first, until `is_old` returns False. is_old: called with the next value to evict."""
        while self._order and is_old(self._oldest()):
            self._evict()

    def _oldest(self) -> object:
        cache, key = next(iter(self._order))
        return cache[key]

    def _evict(self) -> None:
        cache, key = next(iter(self._order))
        cache.drop(key)


class BoundedCache(Generic[K, V]):
    """Cache of values by key. `get` marks a value as used. bound: limits the bytes of this cache and of the others that share it."""

    def __init__(self, bound: CacheBound) -> None:
        self._bound = bound
        self._values: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __getitem__(self, key: K) -> V:
        return self._values[key]

    def get(self, key: K) -> V | None:
        """Return a value, and mark it as the most recently used one; None if it is not cached."""
        if key not in self._values:
            return None
        self._bound.use(self, key)
        return self._values[key]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        """Cache a value, in place of an earlier one of the same key. num_bytes: estimate for key and value."""
        self.drop(key)
        self._values[key] = value
        self._bound.add(self, key, num_bytes)

    def drop(self, key: K) -> None:
        """Drop a value, if it is cached."""
        if key in self._values:
            del self._values[key]
            self._bound.remove(self, key)

    def clear(self) -> None:
        """Drop all values."""
        for key in list(self._values):
            self.drop(key)


@dataclass(slots=True)
class EngineUse:
    """Use of the engine by a job, since the role's start.

    Attributes:
        num_requests: requests that were charged.
        tokens: tokens that were generated for them.
        engine_s: their share of the engine's time, in seconds.
    """

    num_requests: int = 0
    tokens: int = 0
    engine_s: float = 0.0

    def add(self, tokens: int, engine_s: float) -> None:
        """Add the generated tokens and the engine time of a request."""
        self.num_requests += 1
        self.tokens += tokens
        self.engine_s += engine_s


@dataclass(slots=True)
class RecentOutputs:
    """Numbers of generated tokens of a job's last `RECENT` requests. Takes half a KiB of memory."""

    _recent: "array[int]" = field(default_factory=lambda: array("q"))

    def expected_tokens(self, max_tokens: int) -> int:
        """Return the 90th percentile of the recent outputs in tokens, at most `max_tokens`; `max_tokens` if there are no recent outputs."""
        recent = sorted(self._recent) or [max_tokens]
        return min(recent[9 * len(recent) // 10], max_tokens)

    def note(self, num_tokens: int) -> None:
        """Record a request's number of generated tokens."""
        self._recent.append(num_tokens)
        del self._recent[:-RECENT]


@dataclass(slots=True)
class History:
    """A cached conversation. has_branches: whether more than one turn continued it."""

    conversation: Conversation
    has_branches: bool = False


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of the engine with a prompt.

    Attributes:
        number: how often the engine failed while it ran the prompt.
        since: number of requests that the engine had completed before the first failure.
        last: error text of the last failure.
    """

    number: int = 0
    since: int = 0
    last: str = ""


@dataclass(frozen=True, slots=True)
class CacheBounds:
    """Bounds of the caches in `ServedJob`, in bytes. Each bound is for the caches of the same name, of all jobs together."""

    pins: CacheBound = field(default_factory=lambda: CacheBound(16 << 20))
    """About 40,000 pins, of the groups in progress and of past ones. A pin that is not in memory is read again."""
    manifests: CacheBound = field(default_factory=lambda: CacheBound(16 << 20))
    """About 500 manifests with 16 probes of 64 tokens. A manifest that is not in memory is read again."""
    histories: CacheBound = field(default_factory=lambda: CacheBound(64 << 20))
    answers: CacheBound = field(default_factory=lambda: CacheBound(64 << 20))
    failures: CacheBound = field(default_factory=lambda: CacheBound(4 << 20))


@dataclass(slots=True, eq=False)
class ServedAgent:
    """An agent in this replica: its versions, and when its requests used them.

    Attributes:
        ref: identity of the agent.
        newest: its newest committed version; None while it is not served.
        is_strict: whether its job is strict.
        is_placed_here: whether this replica serves its requests; if not, its versions are loaded on request only.
        tenant: tenant of its last request; empty before the first.
        used_at: when one of its requests last began or ended; -infinity before the first.
        proven: numbers of the versions that were proven in this incarnation of the engine.
        used: numbers of the versions that requests have run on in this incarnation of the engine.
        called_at: time of the last request for each past version that may be requested again (`call`), by caller and version.
        ended_slot_s: total seconds of slots that were charged to the agent, without those that a slot still counts (`Slot.charged_s`).
        versions: by number. `slots.ProvenVersions.version` adds them; `serve` drops those without a slot, waiting requests, a
            failure or an unload.
    """

    ref: AgentRef
    newest: int | None = None
    is_strict: bool = False
    is_placed_here: bool = True
    tenant: str = ""
    used_at: float = -math.inf
    proven: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    called_at: dict[str, dict[int, float]] = field(default_factory=dict)
    ended_slot_s: float = 0.0
    versions: "dict[int, Version]" = field(default_factory=dict)

    def serve(self, newest: int | None) -> None:
        """Set its newest committed version, and drop the objects of versions that are not needed any more (`Version.is_needed`).

        newest: None if the agent is not served any more; its tenant, uses, calls and proven versions are then reset.
        """
        self.newest = newest
        self.versions = {number: one for number, one in self.versions.items() if one.is_needed}
        if newest is None:
            self.tenant = ""
            self.used_at = -math.inf
            self.called_at = {}
            self.restart()

    def record_use(self, at: float) -> None:
        """Record that a request ran at this time. Ignored if the agent is not served any more."""
        if self.newest is not None:
            self.used_at = max(self.used_at, at)

    def restart(self) -> None:
        """Forget which of its versions were proven, and which have served requests."""
        self.proven = set()
        self.used = set()

    def slot_s(self, now: float) -> float:
        """Return the seconds for which its versions had slots while its job was served."""
        return self.ended_slot_s + sum(
            one.slot.charged_s(now) for one in self.versions.values() if one.slot is not None
        )

    def call(self, version: int, caller: str, num_open: int, now: float) -> None:
        """Record a request for a version that an open step or evaluation may request ("call") again although newer ones were committed.

        These are the versions of an agent that plays past versions, one for each open step, and the version of an evaluation. The end
        of a step or evaluation is not reported to this role. So a call is dropped after `num_open` later versions of the same caller,
        and counts for `CALLED_S` only.

        Args:
            version: number of the requested version.
            caller: name of the agent that plays past versions, or `(evaluation)` (`policies.past_caller`).
            num_open: most versions that the caller calls at a time.
        """
        called_at = self.called_at.setdefault(caller, {})
        called_at.pop(version, None)
        called_at[version] = now
        while len(called_at) > num_open:
            del called_at[next(iter(called_at))]

    def may_call(self, version: int, now: float) -> bool:
        """Return whether an open step or evaluation may call a past version again."""
        return any(now - called_at.get(version, -math.inf) < CALLED_S for called_at in self.called_at.values())


class ServedJob:
    """State of a job on this replica: its use of the engine, its agents, and its caches.

    Args:
        bounds: of the caches, shared with all other jobs.

    Attributes:
        ref: the job.
        used: the engine use of its requests.
        preempted: the part of `used` by generations that were cancelled after a preemption of the job.
        turn_bytes: bytes that this replica has added to the turns stream.
        outputs: lengths of its last outputs, in tokens.
        pins: pinned versions, by agent (`AgentSettings.pinned_as`) and group.
        manifests: of its agents' versions, by the sha256 of the manifest.
        histories: conversations by agent, episode and number of the last turn; no agent continues another agent's.
        answers: time (loop's clock) and encoded message of each answer, by the key of the request.
        agents: its agents with their versions in the engine, by name.
        failures: failures of the engine, by the sha256 of the prompt.
        is_warned: whether the job has received the warnings about its chat template.
        gone_at: when its document was first missed; None while it exists.
    """

    def __init__(self, ref: JobRef, bounds: CacheBounds) -> None:
        self.ref = ref
        self.used = EngineUse()
        self.preempted = EngineUse()
        self.turn_bytes = 0
        self.outputs = RecentOutputs()
        self.pins: BoundedCache[tuple[str, str], int] = BoundedCache(bounds.pins)
        self.manifests: BoundedCache[str, Manifest] = BoundedCache(bounds.manifests)
        self.histories: BoundedCache[tuple[str, str, int], History] = BoundedCache(bounds.histories)
        self.answers: BoundedCache[Hashable, tuple[float, bytes]] = BoundedCache(bounds.answers)
        self.failures: BoundedCache[bytes, Failures] = BoundedCache(bounds.failures)
        self.agents: dict[str, ServedAgent] = {}
        self.is_warned = False
        self.gone_at: float | None = None

    def slot_s(self, now: float) -> dict[str, float]:
        """Return the seconds for which each agent's versions had slots, by the agent's name. Agents without slot seconds are left out."""
        totals = ((name, agent.slot_s(now)) for name, agent in self.agents.items())
        return {name: seconds for name, seconds in totals if seconds}

    def clear_caches(self) -> None:
        """Empty the job's caches, so that they take nothing of the bounds that all jobs share."""
        for cache in (self.pins, self.manifests, self.histories, self.answers, self.failures):
            cache.clear()


class ServedJobs:
    """The state of each job on this replica, kept until the job's document has been gone for `GONE_S`.

    bounds: of the jobs' caches; all jobs share them.
    """

    def __init__(self) -> None:
        self.bounds = CacheBounds()
        self._jobs: dict[JobRef, ServedJob] = {}

    def __iter__(self) -> Iterator[ServedJob]:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def find(self, ref: JobRef) -> ServedJob | None:
        """Return the state of a job; None if this replica has none yet."""
        return self._jobs.get(ref)

    def of(self, ref: JobRef) -> ServedJob:
        """Return the state of a job, created at the first use. The job must be known to exist."""
        if (found := self._jobs.get(ref)) is None:
            found = self._jobs[ref] = ServedJob(ref, self.bounds)
        return found

    def agent(self, ref: AgentRef) -> ServedAgent:
        """Return the state of an agent, created at the first use. The agent's job must be known to exist."""
        agents = self.of(ref.job).agents
        if (found := agents.get(ref.name)) is None:
            found = agents[ref.name] = ServedAgent(ref)
        return found

    def agents(self) -> list[ServedAgent]:
        """Return the agents of all jobs that this replica knows."""
        return [agent for job in self for agent in job.agents.values()]

    def drop_gone(self, present: Collection[JobRef], now: float) -> list[ServedJob]:
        """Drop the jobs whose document has been gone for `GONE_S`, and return them. present: jobs that have a document.

        A request that ends late may create the entry of a dropped job again. That entry is dropped in the same way.
        """
        for job in self:
            gone_at = now if job.gone_at is None else job.gone_at
            job.gone_at = None if job.ref in present else gone_at
        gone = [job for job in self if job.gone_at is not None and now - job.gone_at >= GONE_S]
        for job in gone:
            del self._jobs[job.ref]
            job.clear_caches()
        return gone
