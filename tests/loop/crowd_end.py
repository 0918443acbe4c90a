"""What a run of `crowd` has recorded and left, read while its processes still run and all of its jobs have ended."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import TypeVar

from tests.loop.crowd import Crowd
from tests.loop.recorded import Recorded

from marlaas_api import subjects
from marlaas_api.blobs import BlobRef, Blobs
from marlaas_api.blobs_store import open_blobs
from marlaas_api.bus import Bus, Entry, Stored
from marlaas_api.messages import (
    BusMessage,
    Episode,
    JobDocument,
    Manifest,
    PolicyRecord,
    Progress,
    ReplicaReport,
    StepRecord,
    TenantUsage,
    Turn,
)
from marlaas_api.messages.usage import total
from marlaas_api.wire import decode_as

WITHIN_S = 300.0
"""A trainer that was killed late is ready again after one or two minutes."""
M = TypeVar("M", bound=BusMessage)


@dataclass(frozen=True)
class EndedJob:
    """A job's records. manifests: by agent, of all versions, the newest first, by the names of their blobs. recorded: by agent."""

    document: JobDocument
    progress: Progress
    steps: list[StepRecord]
    manifests: dict[str, dict[str, Manifest]]
    recorded: dict[str, Recorded]

    @property
    def name(self) -> str:
        """Namespace and name."""
        return f"{self.document.namespace}/{self.document.job}"

    def versions(self, agent: str) -> list[Manifest]:
        """Return the manifests of an agent's versions, the oldest first."""
        return list(self.manifests[agent].values())[::-1]

    def consumed(self, agent: str) -> list[str]:
        """Return the names of the groups that trained an agent."""
        return [name for manifest in self.versions(agent) for name in manifest.consumed]

    def blobs(self, num_states: int, agent: str) -> set[str]:
        """Return the names of the blobs that an agent's versions refer to; the newest versions keep their training states."""
        versions = self.versions(agent)
        found = {*self.manifests[agent], *(file.name for version in versions for file in version.files.values())}
        return found | {version.state.name for version in versions[-num_states:] if version.state is not None}


@dataclass(frozen=True)
class End:
    """The end of a run.

    keys: by bucket. messages: by stream, those on subjects of jobs. blobs: bytes of each file of the blob store. held: by
    replica, files of adapters.
    """

    jobs: list[EndedJob]
    reports: list[ReplicaReport]
    tenants: dict[str, TenantUsage]
    keys: dict[str, set[str]]
    messages: dict[str, list[Stored]]
    consumers: set[str]
    blobs: dict[str, int]
    held: dict[str, set[str]]


async def read_end(run: Crowd, *names: str) -> End:
    """Wait until the roles have nothing left to do; then read everything. names: of the jobs."""
    folder = run.out / ".state" / "blobs"
    blobs = open_blobs(folder)
    reports = await _reports(run.bus)
    await _purged(run.bus)
    turns = _decoded(Turn, await run.recorded(subjects.TURNS))
    episodes = _decoded(Episode, await run.recorded(subjects.EPISODES))
    jobs, tenants = await _accounted(
        run.bus, lambda: [_job(run.bus, blobs, name.replace("/", "."), turns, episodes) for name in names]
    )
    return End(
        jobs,
        reports,
        tenants,
        {spec.name: {entry.key for entry in await _entries(run.bus, spec.name)} for spec in subjects.BUCKETS},
        {spec.name: await run.bus.replay(spec.name, ">") for spec in subjects.STREAMS},
        await run.consumers(),
        {name: (folder / name).stat().st_size for name in await blobs.list("")},
        {one.replica: _adapter_folders(run.out, one) for one in reports if one.role == "rollout"},
    )


async def _entries(bus: Bus, name: str) -> list[Entry]:
    return await (await bus.bucket(name)).entries()


async def _get(bus: Bus, kind: type[M], bucket: str, key: str) -> M:
    entry = await (await bus.bucket(bucket)).get(key)
    assert entry is not None
    assert entry.data is not None
    return decode_as(kind, entry.data)


def _decoded(kind: type[M], stored: Iterable[Stored]) -> list[M]:
    return [decode_as(kind, one.data) for one in stored]


async def _job(bus: Bus, blobs: Blobs, key: str, turns: list[Turn], episodes: list[Episode]) -> EndedJob:
    document = await _get(bus, JobDocument, subjects.JOBS, key)
    agents = [agent.name for agent in document.spec.agents]
    records = {name: await _get(bus, PolicyRecord, subjects.POLICY, f"{key}.{name}") for name in agents}
    played = [one for one in episodes if one.uid == document.uid]
    said = {name: [one for one in turns if (one.uid, one.agent) == (document.uid, name)] for name in agents}
    return EndedJob(
        document,
        await _get(bus, Progress, subjects.PROGRESS, key),
        _decoded(StepRecord, await bus.replay(subjects.STEPS, f"step.{key}.*")),
        {name: dict(await _manifests(blobs, record.manifest)) for name, record in records.items()},
        {name: Recorded(name, own, played) for name, own in said.items()},
    )


async def _manifests(blobs: Blobs, ref: BlobRef | None) -> list[tuple[str, Manifest]]:
    found = []
    while ref is not None:
        manifest = decode_as(Manifest, await blobs.get(ref))
        found.append((ref.name, manifest))
        ref = manifest.parent
    return found


async def _watched(bus: Bus, kind: type[M], bucket: str, prefix: str, wanted: Callable[[list[M]], bool]) -> list[M]:
    """Return the values of a bucket's keys, once they are as wanted."""
    now: dict[str, M] = {}
    async with asyncio.timeout(WITHIN_S), (await bus.bucket(bucket)).watch(prefix) as entries:
        async for entry in entries:
            now.pop(entry.key, None)
            if entry.data is not None:
                now[entry.key] = decode_as(kind, entry.data)
            if wanted(list(now.values())):
                return list(now.values())
    raise AssertionError("the watch ended")


async def _reports(bus: Bus) -> list[ReplicaReport]:
    """Return the reports of two replicas, two trainers and an orchestrator that have nothing to do."""

    since = time.time()

    def is_idle(found: list[ReplicaReport]) -> bool:
        """Also whether the reports are of now: those of before the end lack the last turns."""
        is_new = len(found) == 5 and all(one.at >= since for one in found)
        return is_new and not any(one.bound or one.num_running or not one.ready for one in found)

    return await _watched(bus, ReplicaReport, subjects.REPLICAS, "", is_idle)


async def _purged(bus: Bus) -> None:
    """Wait until the orchestrator has purged the turns of ended jobs, which their recorders read first."""
    async with asyncio.timeout(WITHIN_S):
        while await bus.replay(subjects.TURNS, ">"):  # noqa: ASYNC110 - the bus tells nobody of a purge
            await asyncio.sleep(0.2)


async def _accounted(
    bus: Bus, read: Callable[[], list[Awaitable[EndedJob]]]
) -> tuple[list[EndedJob], dict[str, TenantUsage]]:
    """Return the jobs, and the tenants' usage once it has theirs: the orchestrator writes it every ten seconds.

    The jobs are read again each time, because replicas may report use after their end.
    """
    async with asyncio.timeout(WITHIN_S):
        while True:
            jobs = [await one for one in read()]
            entries = await (await bus.bucket(subjects.TENANTS)).entries(subjects.TENANT_USAGE)
            found = [decode_as(TenantUsage, entry.data) for entry in entries if entry.data is not None]
            now, expected = total(one.total for one in found), total(one.progress.amounts for one in jobs)
            if all(isclose(getattr(now, name), number) for name, number in expected.model_dump().items()):
                return jobs, {one.tenant: one for one in found}
            await asyncio.sleep(0.5)


def _adapter_folders(out: Path, report: ReplicaReport) -> set[str]:
    folder = out / ".state" / "scratch" / f"{report.replica}.{report.pool}" / "adapters"
    return {one.name for one in folder.iterdir()}
