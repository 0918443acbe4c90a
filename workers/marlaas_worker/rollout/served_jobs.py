"""State of the jobs that a replica serves: one object per job, dropped as a whole. No I/O; the caller passes the clock, in seconds.

A job's caches hold values that can be read again from the bus or the blob store, or are not needed for long. Caches of one kind share a
bound in bytes over all jobs. The engine's failures are counted by prompt; a prompt that has ended the engine three times is refused.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from marlaas_api.errors import Permanent
from marlaas_api.messages import Manifest
from marlaas_api.names import AgentRef, JobRef
from marlaas_worker.rollout.agent_versions import ServedAgent
from marlaas_worker.rollout.conversation import Conversation

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
GONE_S = 60.0
"""Seconds for which a job's totals are reported after its document is gone, so that the orchestrator reads the last ones."""
MAX_ENGINE_FAILURES = 3
RECENT = 64
"""Number of a job's last outputs from which the length of its next ones is estimated."""
_ENTRY_BYTES = 1024


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


class EngineKilled(Permanent):
    """The engine failed each time that it ran a prompt. Another try would end it for all tenants again.

    is_sure: whether the engine has generated for other requests since the first failure, so that the prompt must be the cause.
    """

    def __init__(self, text: str, *, is_sure: bool) -> None:
        super().__init__(text)
        self.is_sure = is_sure


@dataclass(slots=True)
class EngineFailures:
    """Counts the failures of this replica's engine by job and prompt (`ServedJob.failures`).

    By prompt, because the members of a group have the same one, and so has another attempt at an episode. If several requests with a
    prompt run when the engine fails, that counts as one failure. The failures with a prompt are forgotten once the engine has generated
    a reply to it. A request also counts its own failures, because the tokens that were sampled for it may be the cause.
    """

    _num_generated: int = 0

    def of(self, job: ServedJob, prompt_ids: NDArray[np.int32], own: Failures) -> Failures:
        """Return the failures of the engine with a job's prompt, or those of one request, if they are more. own: of the request alone."""
        shared = job.failures.get(_key(prompt_ids)) if len(job.failures) else None
        return own if shared is None or shared.number < own.number else shared

    def note(
        self, job: ServedJob, prompt_ids: NDArray[np.int32], known: Failures, own: Failures, text: str
    ) -> Failures:
        """Record a failure of the engine while it ran a request, and return the request's own failures.

        known: the result of `of` when the request was given to the engine. own: the request's own before this one. text: the error.
        """
        key = _key(prompt_ids)
        shared = self._more(known, text)
        found = job.failures.get(key)
        if found is None or found.number < shared.number:
            job.failures.put(key, shared, _ENTRY_BYTES)
        return self._more(own, text)

    def _more(self, before: Failures, text: str) -> Failures:
        return Failures(before.number + 1, before.since if before.number else self._num_generated, text)

    def generated(self, job: ServedJob, prompt_ids: NDArray[np.int32]) -> None:
        """Record that the engine has generated a reply to a prompt, and forget the failures with this prompt."""
        self._num_generated += 1
        if len(job.failures):
            job.failures.drop(_key(prompt_ids))

    def verdict(self, job: ServedJob, prompt_ids: NDArray[np.int32], found: Failures, turn: str) -> EngineKilled:
        """Return the error of a request whose prompt is not run again.

        If the engine has generated nothing else since the first failure, the failures may have another cause than the prompt. The next
        request with the prompt, such as that of another attempt at the episode, is then run once, alone in the engine.

        found: the failures with the prompt, from `of`. turn: name of the request's turn, for the error's text.
        """
        is_sure = self._num_generated > found.since
        if not is_sure:
            once = replace(found, number=MAX_ENGINE_FAILURES - 1)
            job.failures.put(_key(prompt_ids), once, _ENTRY_BYTES)
        text = f"the engine failed {found.number} times while it ran the prompt of turn {turn}; last: {found.last}"
        advice = "change the prompt, or ask the platform team, who finds the cause in the log of the rollout role"
        return EngineKilled(f"{text}; {advice}" if is_sure else text, is_sure=is_sure)


def _key(prompt_ids: NDArray[np.int32]) -> bytes:
    return hashlib.sha256(prompt_ids.tobytes()).digest()
