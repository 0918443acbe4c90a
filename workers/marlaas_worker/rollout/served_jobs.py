"""State of the jobs that a replica serves: one object per job, dropped as a whole. No I/O; the caller passes the clock, in seconds."""

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field

from marlaas_api.messages import Manifest
from marlaas_api.names import AgentRef, JobRef
from marlaas_worker.rollout.agent_versions import ServedAgent
from marlaas_worker.rollout.bounded_cache import BoundedCache, CacheBound
from marlaas_worker.rollout.conversation import Conversation
from marlaas_worker.rollout.kv_budget import RecentOutputs

GONE_S = 60.0
"""Seconds for which a job's totals are reported after its document is gone, so that the orchestrator reads the last ones."""


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
