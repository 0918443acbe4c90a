"""Forgetting a job: its messages, keys and blobs go, its document last, so that whoever waits for the document's end knows that all is gone.

Crash-safe at every point: each effect may be repeated, and what decides what is kept (the level, the manifests of the kept version) goes after
what it decides about. A worker that still had the job in hand may write once more; so rounds are made until one finds nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.blobs import BlobCorrupt, BlobMissing, BlobRef
from marlaas_api.bus import RevisionConflict
from marlaas_api.failpoints import failpoint
from marlaas_api.messages import JobDocument, Manifest, PolicyRecord, Progress, ReplicaReport
from marlaas_api.names import AdapterRef, JobRef, job_prefix
from marlaas_api.wire import decode_as
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.role import RoleContext

ROUND_S = 1.0
GONE_S = 15.0
MAX_DELETES = 16

log = logging.getLogger(__name__)
Reports = Callable[[], Sequence[ReplicaReport]]


@dataclass(frozen=True, slots=True)
class Doomed:
    """A job to be forgotten. agents: those that its document names. keep_adapter: its published adapter stays in the blob store."""

    ref: JobRef
    agents: tuple[str, ...] = ()
    keep_adapter: bool = True

    @staticmethod
    def by_document(document: JobDocument) -> "Doomed":
        """A job that is to be deleted."""
        names = tuple(agent.name for agent in document.spec.agents)
        return Doomed(document.ref, names, document.spec.adapter_retention == "keep")

    @staticmethod
    def by_progress(level: Progress) -> "Doomed":
        """A job whose document was replaced by a later job's of the same name: nobody can say any more that its adapter may go."""
        return Doomed(level.ref, tuple(level.versions))


class Deletion:
    """One job's."""

    def __init__(self, context: RoleContext, levels: ProgressStore, reports: Reports, doomed: Doomed) -> None:
        self._bus, self._blobs = context.bus, context.blobs
        self._progress_store, self._reports, self._doomed = levels, reports, doomed
        self._ref = doomed.ref

    async def run(self) -> None:
        """Return when nothing of the job is left. Raises as the bus and the blob store do; may be repeated."""
        if self._has_begun():
            await self._let_go()
            found = True
            while found:
                found = await self._round()
                await asyncio.sleep(ROUND_S if found else 0)
        await self._bus.purge(subjects.EVENTS, subjects.event(self._ref.namespace, self._ref.name, ">"))
        failpoint("orchestrator.delete.after_rounds")
        await self._progress_store.forget(self._ref)
        failpoint("orchestrator.delete.after_level")
        await self._forget_document()
        log.info("%s (%s) is forgotten", self._ref, self._ref.uid)

    def _has_begun(self) -> bool:
        """A job that was never admitted owns nothing: its level is written before anything else is."""
        level = self._progress_store.of(self._ref)
        return level is not None and (level.admitted or level.started_at is not None)

    async def _let_go(self) -> None:
        """Wait until no trainer has the job in hand; one that hangs is not waited for, its lease ends with the policy key."""
        mark = f".{self._ref.uid}."
        for _ in range(int(GONE_S / ROUND_S)):
            if not any(mark in name for report in self._reports() for name in report.bound):
                return
            await asyncio.sleep(ROUND_S)

    async def _round(self) -> bool:
        """Remove all that is there; whether there was any that only a living worker can have written."""
        policies = await self._policies()
        await self._forget_messages([*self._doomed.agents, *policies])
        failpoint("orchestrator.delete.after_messages")
        await self._forget_keys(subjects.PINS, f"{self._ref.key}.")
        await (await self._bus.bucket(subjects.LEDGER)).delete(self._ref.key)
        found = await self._forget_blobs(policies)
        failpoint("orchestrator.delete.after_blobs")
        await self._forget_keys(subjects.POLICY, f"{self._ref.key}.")
        failpoint("orchestrator.delete.after_policy")
        return found or bool(policies)

    async def _policies(self) -> dict[str, PolicyRecord]:
        prefix = f"{self._ref.key}."
        entries = await (await self._bus.bucket(subjects.POLICY)).entries(prefix)
        return {entry.key.removeprefix(prefix): decode_as(PolicyRecord, entry.data or b"") for entry in entries}

    async def _forget_messages(self, agents: Iterable[str]) -> None:
        namespace, job = self._ref.namespace, self._ref.name
        consumers = [(subjects.EPISODES, "orchestrator"), (subjects.EPISODES, "reader"), (subjects.TASKS, "sandbox")]
        for stream, reader in consumers:
            await self._bus.delete_consumer(stream, subjects.consumer(namespace, job, reader))
        for agent in dict.fromkeys(agents):
            await self._bus.delete_consumer(subjects.GROUPS, subjects.consumer(namespace, job, agent, "trainer"))
        for stream, subject in (
            (subjects.TASKS, subjects.task(namespace, job)),
            (subjects.TURNS, subjects.turn(namespace, job, "*", "*")),
            (subjects.EPISODES, subjects.episode(namespace, job)),
            (subjects.GROUPS, subjects.group(namespace, job, "*")),
            (subjects.STEPS, f"step.{namespace}.{job}.*"),
            (subjects.STEPS, f"eval.{namespace}.{job}.*"),
        ):
            await self._bus.purge(stream, subject)

    async def _forget_keys(self, name: str, prefix: str) -> None:
        bucket = await self._bus.bucket(name)
        for entry in await bucket.entries(prefix):
            await bucket.delete(entry.key)

    async def _forget_blobs(self, policies: dict[str, PolicyRecord]) -> bool:
        """Remove all blobs but those of the published adapters, and in their folders first: see `_kept`."""
        names = await self._blobs.list(job_prefix(self._ref))
        kept: set[str] = set()
        folders: list[str] = []
        for adapter in self._published():
            folders.append(f"{adapter.blob_prefix}/")
            record = policies.get(adapter.agent)
            own = record.manifest if record is not None and record.uid == self._ref.uid else None
            kept |= await self._kept(adapter, own, [name for name in names if name.startswith(folders[-1])])
        doomed = [name for name in names if name not in kept]
        for name in sorted(doomed, key=lambda name: not name.startswith(tuple(folders))):
            await self._blobs.delete(name)
        return bool(doomed)

    def _published(self) -> list[AdapterRef]:
        """The promoted version of each agent, of a job that did not succeed its newest; version 0 is a result only if it was promoted."""
        level = self._progress_store.of(self._ref)
        if level is None or not self._doomed.keep_adapter:
            return []
        ref = self._ref
        versions = {agent: version for agent, version in level.versions.items() if version > 0} | level.promoted
        return [AdapterRef(ref.namespace, ref.name, ref.uid, agent, version) for agent, version in versions.items()]

    async def _kept(self, adapter: AdapterRef, newest: BlobRef | None, folder: list[str]) -> set[str]:
        """The manifest and the files of a version. Where no chain of manifests leads to it any more, an earlier attempt came
        past this folder, and all that it left there is kept."""
        ref = newest
        try:
            while ref is not None:
                manifest = decode_as(Manifest, await self._blobs.get(ref))
                if manifest.version == adapter.version:
                    return {ref.name, *(file.name for file in manifest.files.values())}
                ref = manifest.parent
        except (BlobMissing, BlobCorrupt) as error:
            log.warning("%s: %s", adapter, error)
        return set(folder)

    async def _forget_document(self) -> None:
        """Remove the document, unless a later job has taken its place."""
        bucket = await self._bus.bucket(subjects.JOBS)
        entry = await bucket.get(self._ref.key)
        if entry is None or entry.data is None:
            return
        document = decode_as(JobDocument, entry.data)
        if document.uid != self._ref.uid or not document.deleted:
            return
        try:
            await bucket.delete(self._ref.key, entry.revision)
        except RevisionConflict:
            log.info("%s: another document has taken its place", self._ref)
