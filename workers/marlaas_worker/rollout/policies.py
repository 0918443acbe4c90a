"""What the orchestrator and the trainers say: which jobs are admitted, and which version of each agent's policy is true.

Views of the buckets `jobs`, `progress` and `policy`. A record of another uid than the job's is an earlier job's and counts as absent.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.bus import Bus
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.kinds import AgentSpec
from marlaas_api.messages import JobDocument, PolicyRecord, Progress
from marlaas_api.names import AdapterRef, JobRef
from marlaas_worker.bucket_cache import BucketCache


class RequestRefused(Permanent):
    """A request that can never be served; the text says what is wrong with it."""


class NotAdmitted(Retryable):
    """The job may not run now (queued, suspended or finished)."""


@dataclass(frozen=True, slots=True)
class Served:
    """An agent of an admitted job whose turns this pool generates."""

    document: JobDocument
    agent: AgentSpec

    @property
    def subject(self) -> str:
        """Where its requests come in."""
        return subjects.generation(self.document.namespace, self.document.job, self.agent.name)

    @property
    def policy_key(self) -> str:
        """Where its policy is."""
        return subjects.policy_key(self.document.namespace, self.document.job, self.agent.name)

    def adapter(self, version: int) -> AdapterRef:
        """Its adapter at a version."""
        job = self.document
        return AdapterRef(job.namespace, job.job, job.uid, self.agent.name, version)


def agents_of(document: JobDocument, pool: str) -> Iterator[Served]:
    """The job's agents that live on this pool."""
    for agent in document.spec.agents:
        if (agent.pool_ref.name if agent.pool_ref else document.pool) == pool:
            yield Served(document, agent)


class Policies:
    """Keeps up with the buckets; `changed` is called after each change."""

    def __init__(self, bus: Bus, pool: str, changed: Callable[[], None]) -> None:
        self._pool = pool
        self._jobs = BucketCache(bus, subjects.JOBS, JobDocument, changed)
        self._progress = BucketCache(bus, subjects.PROGRESS, Progress, changed)
        self._policy = BucketCache(bus, subjects.POLICY, PolicyRecord, changed)

    async def follow(self) -> None:
        """Keep up, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for cache in (self._jobs, self._progress, self._policy):
                group.create_task(cache.follow())

    def served(self) -> list[Served]:
        """All agents of admitted jobs on this pool."""
        return [
            served
            for _, document, _ in self._jobs.items()
            if not document.deleted and _admits(self._progress.get(document.ref.key), document.ref)
            for served in agents_of(document, self._pool)
        ]

    def newest(self) -> list[AdapterRef]:
        """The true version of every served agent that has one."""
        pairs = ((served, self._policy.get(served.policy_key)) for served in self.served())
        return [
            served.adapter(record.version)
            for served, record in pairs
            if record is not None and record.uid == served.document.uid and record.manifest is not None
        ]

    async def find(self, job: JobRef, agent: str) -> Served:
        """The agent that a request is for; asks the bus again before it says no.

        Raises RequestRefused (no such job, another uid, no such agent here), NotAdmitted, BusUnavailable.
        """
        document = self._jobs.get(job.key)
        if document is None or document.uid != job.uid or document.deleted:
            document = await self._jobs.read(job.key)
        if document is None or document.deleted:
            raise RequestRefused(f"there is no job {job}")
        if document.uid != job.uid:
            raise RequestRefused(f"job {job} has uid {document.uid}; this request is of an earlier one, {job.uid}")
        await self._require_admitted(document.ref)
        for served in agents_of(document, self._pool):
            if served.agent.name == agent:
                return served
        raise RequestRefused(f"job {job} has no agent {agent!r} on pool {self._pool}")

    async def record(self, adapter: AdapterRef) -> PolicyRecord | None:
        """The agent's policy, read again if what is known is older than this version. Raises BusUnavailable."""
        key = subjects.policy_key(adapter.namespace, adapter.job, adapter.agent)
        record = self._policy.get(key)
        if record is None or record.uid != adapter.uid or record.version < adapter.version or record.manifest is None:
            record = await self._policy.read(key)
        return record if record is not None and record.uid == adapter.uid else None

    async def _require_admitted(self, job: JobRef) -> None:
        if _admits(self._progress.get(job.key), job):
            return
        if not _admits(await self._progress.read(job.key), job):
            raise NotAdmitted(f"job {job} is not admitted now")


def _admits(progress: Progress | None, job: JobRef) -> bool:
    return progress is not None and progress.uid == job.uid and progress.admitted
