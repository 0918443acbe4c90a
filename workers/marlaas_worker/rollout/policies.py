"""Admitted jobs and committed policy versions: caches of the buckets `jobs`, `progress` and `policy`.

A record with another uid than the job's belongs to an earlier job of the same name, and counts as absent.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.bucket_cache import BucketCache
from marlaas_api.bus import Bus
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.messages import JobDocument, PolicyRecord, Progress
from marlaas_api.messages.job_spec import AgentSettings
from marlaas_api.names import AdapterRef, JobRef


class RequestRefused(Permanent):
    """A request that can never be served; the text has the reason."""


class NotAdmitted(Retryable):
    """The job is not admitted now (queued, suspended or finished)."""


@dataclass(frozen=True, slots=True)
class Served:
    """An agent of an admitted job whose turns this pool generates."""

    document: JobDocument
    agent: AgentSettings

    @property
    def subject(self) -> str:
        """The subject of its generation requests."""
        return subjects.generation(self.document.namespace, self.document.job, self.agent.name)

    @property
    def policy_key(self) -> str:
        """The key of its policy record."""
        return subjects.policy_key(self.document.namespace, self.document.job, self.agent.name)

    def adapter(self, version: int) -> AdapterRef:
        """Return its adapter at a version."""
        job = self.document
        return AdapterRef(job.namespace, job.job, job.uid, self.agent.name, version)


def agents_of(document: JobDocument, pool: str) -> Iterator[Served]:
    """Yield the job's agents that run on this pool."""
    for agent in document.spec.agents:
        if (agent.pool_ref.name if agent.pool_ref else document.pool) == pool:
            yield Served(document, agent)


class Policies:
    """Caches of the three buckets; `changed` is called after each change."""

    def __init__(self, bus: Bus, pool: str, changed: Callable[[], None]) -> None:
        self._pool = pool
        self._jobs = BucketCache(lambda: bus.bucket(subjects.JOBS), JobDocument, lambda _: changed())
        self._progress = BucketCache(lambda: bus.bucket(subjects.PROGRESS), Progress, lambda _: changed())
        self._policy = BucketCache(lambda: bus.bucket(subjects.POLICY), PolicyRecord, lambda _: changed())

    async def follow(self) -> None:
        """Keep the caches up to date, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for cache in (self._jobs, self._progress, self._policy):
                group.create_task(cache.follow())

    def served(self) -> list[Served]:
        """Return all agents of admitted jobs on this pool."""
        return [
            served
            for _, document, _ in self._jobs.items()
            if not document.deleted and _admits(self._progress.get(document.ref.key), document.ref)
            for served in agents_of(document, self._pool)
        ]

    def newest(self) -> list[AdapterRef]:
        """Return the committed version of every served agent that has one."""
        pairs = ((served, self._policy.get(served.policy_key)) for served in self.served())
        return [
            served.adapter(record.version)
            for served, record in pairs
            if record is not None and record.uid == served.document.uid and record.manifest is not None
        ]

    async def find(self, job: JobRef, agent: str) -> Served:
        """Return the agent that a request names. Reads the bus again before it refuses.

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
        """Return the agent's policy record; None if there is none for this job.

        Reads the bus if the cached record is older than the adapter's version. Raises BusUnavailable.
        """
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
