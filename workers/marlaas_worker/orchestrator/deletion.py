"""Deletion of a job: removes its messages, keys and blobs, and last its document.

A missing document therefore means that everything of the job is removed. Crash-safe at every point: each effect
may be repeated. The records that decide what is kept (the progress, the manifests of the kept version) are
removed after everything that depends on them. A worker that still has the job may write once more, so rounds
are repeated until one finds nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from marlaas_api import subjects
from marlaas_api.blobs import BlobCorrupt, BlobMissing, BlobRef
from marlaas_api.failpoints import failpoint
from marlaas_api.fenced import FencedKey, Overtaken
from marlaas_api.messages import JobDocument, Manifest, PolicyRecord, Progress, ReplicaReport
from marlaas_api.names import AdapterRef, JobRef, job_prefix
from marlaas_api.retries import patiently
from marlaas_api.wire import decode_as
from marlaas_worker.orchestrator.progress_store import ProgressStore
from marlaas_worker.orchestrator.usage import with_late_use
from marlaas_worker.role import RoleContext

ROUND_S = 1.0
UNBIND_S = 15.0
RETRY_S, LONGEST_RETRY_S = 1.0, 15.0
"""First and longest pause after an error, in seconds."""
MAX_DELETES = 16

log = logging.getLogger(__name__)
Reports = Callable[[], Sequence[ReplicaReport]]


@dataclass(frozen=True, slots=True)
class DeletedJob:
    """A job that is to be deleted. A later job of the same name may have replaced its document.

    Attributes:
        ref: namespace, name and uid of the job.
        agents: names of its agents, as far as its document or progress contains them.
        keep_adapter: whether its published adapters stay in the blob store.
    """

    ref: JobRef
    agents: tuple[str, ...] = ()
    keep_adapter: bool = True

    @staticmethod
    def by_document(document: JobDocument) -> "DeletedJob":
        """Return the `DeletedJob` of a job whose document is marked as deleted."""
        names = tuple(agent.name for agent in document.spec.agents)
        return DeletedJob(document.ref, names, document.spec.adapter_retention == "keep")

    @staticmethod
    def by_progress(progress: Progress) -> "DeletedJob":
        """Return the `DeletedJob` of a job whose document was replaced by a later job of the same name.

        Its adapters are kept: the document, which could allow their removal, no longer exists.
        """
        return DeletedJob(progress.ref, tuple(progress.versions))


class Deletion:
    """Deletes the messages, keys and blobs of one job, and last its document.

    Args:
        context: has the bus, the blob store and the clock.
        progress_store: progress of all jobs.
        reports: returns the latest reports of all replicas.
        job: the job to delete.
    """

    def __init__(self, context: RoleContext, progress_store: ProgressStore, reports: Reports, job: DeletedJob) -> None:
        self._bus, self._blobs, self._now = context.bus, context.blobs, context.now
        self._progress_store, self._reports, self._job = progress_store, reports, job
        self._ref = job.ref

    async def run(self) -> None:
        """Delete the job, and return when nothing of it is left. May be repeated. Raises errors of the bus and the blob store."""
        if self._has_begun():
            await self._let_go()
            found = True
            while found:
                found = await self._round()
                await asyncio.sleep(ROUND_S if found else 0)
            await self._blobs.sweep(job_prefix(self._ref))
        await self._bus.purge(subjects.EVENTS, subjects.event(self._ref.namespace, self._ref.name, ">"))
        failpoint("orchestrator.delete.after_rounds")
        await self._count_late_use()
        await self._progress_store.delete(self._ref)
        failpoint("orchestrator.delete.after_progress")
        await self._delete_document()
        log.info("deleted job %s (uid %s)", self._ref, self._ref.uid)

    async def _count_late_use(self) -> None:
        """Add to the job's progress the use that replicas have reported since its last write: generations may end after the job's loop."""
        progress = self._progress_store.of(self._ref)
        if progress is not None and self._has_begun():
            await self._progress_store.put(with_late_use(progress, list(self._reports()), self._now()))

    def _has_begun(self) -> bool:
        """Return whether the job was ever admitted. Otherwise it has no data to delete: a job's admission is published before anything else."""
        progress = self._progress_store.of(self._ref)
        return progress is not None and (progress.admitted or progress.started_at is not None)

    async def _let_go(self) -> None:
        """Wait until no trainer reports an agent of the job as bound, at most UNBIND_S seconds.

        A trainer that hangs keeps the agent longer. It can commit nothing more once the agent's policy record, which contains the trainer's
        lease, is deleted.
        """
        mark = f".{self._ref.uid}."
        for _ in range(int(UNBIND_S / ROUND_S)):
            if not any(mark in name for report in self._reports() for name in report.bound):
                return
            await asyncio.sleep(ROUND_S)

    async def _round(self) -> bool:
        """Delete the job's messages, pins, blobs and policy records.

        Return whether there were policy records or blobs to delete. Then another round is needed, since a worker may have written meanwhile.
        """
        policies = await self._policies()
        await self._delete_messages([*self._job.agents, *policies])
        failpoint("orchestrator.delete.after_messages")
        await self._delete_keys(subjects.PINS, f"{self._ref.key}.")
        found = await self._delete_blobs(policies)
        failpoint("orchestrator.delete.after_blobs")
        await self._delete_keys(subjects.POLICY, f"{self._ref.key}.")
        failpoint("orchestrator.delete.after_policy")
        return found or bool(policies)

    async def _policies(self) -> dict[str, PolicyRecord]:
        prefix = f"{self._ref.key}."
        entries = await (await self._bus.bucket(subjects.POLICY)).entries(prefix)
        return {
            entry.key.removeprefix(prefix): decode_as(PolicyRecord, entry.data or b"", entry.key) for entry in entries
        }

    async def _delete_messages(self, agents: Iterable[str]) -> None:
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
            (subjects.GROUPS, subjects.job_log(namespace, job)),
            (subjects.STEPS, f"step.{namespace}.{job}.*"),
            (subjects.STEPS, f"eval.{namespace}.{job}.*"),
        ):
            await self._bus.purge(stream, subject)

    async def _delete_keys(self, name: str, prefix: str) -> None:
        bucket = await self._bus.bucket(name)
        for entry in await bucket.entries(prefix):
            await bucket.delete(entry.key)

    async def _delete_blobs(self, policies: dict[str, PolicyRecord]) -> bool:
        """Delete the job's blobs, except the manifests and files of the adapters that are kept (`_published`); return whether it deleted any.

        Blobs in the folders of kept adapters are deleted before all others. So if a deletion is interrupted and repeated, and manifests on
        the chain to a kept version are already gone, that version's folder holds only blobs to keep; `_kept` relies on that.

        Args:
            policies: the job's policy records, by agent. They name the newest manifest.
        """
        names = await self._blobs.list(job_prefix(self._ref))
        kept: set[str] = set()
        folders: list[str] = []
        for adapter in self._published():
            folders.append(f"{adapter.blob_prefix}/")
            record = policies.get(adapter.agent)
            own = record.manifest if record is not None and record.uid == self._ref.uid else None
            kept |= await self._kept(adapter, own, [name for name in names if name.startswith(folders[-1])])
        unneeded = [name for name in names if name not in kept]
        for name in sorted(unneeded, key=lambda name: not name.startswith(tuple(folders))):
            await self._blobs.delete(name)
        return bool(unneeded)

    def _published(self) -> list[AdapterRef]:
        """Return the adapters to keep: the promoted version of each agent, or its newest if none was promoted.

        Only a job that succeeded has promoted versions. Version 0 is kept only if it was promoted. The list is empty if the job's adapters are
        not kept (`DeletedJob.keep_adapter`), or the job has no progress.
        """
        progress = self._progress_store.of(self._ref)
        if progress is None or not self._job.keep_adapter:
            return []
        ref = self._ref
        versions = {agent: version for agent, version in progress.versions.items() if version > 0} | progress.promoted
        return [AdapterRef(ref.namespace, ref.name, ref.uid, agent, version) for agent, version in versions.items()]

    async def _kept(self, adapter: AdapterRef, newest: BlobRef | None, folder: list[str]) -> set[str]:
        """Return the names of a kept version's manifest and files.

        If the chain of manifests no longer reaches the version, an earlier attempt has already cleaned its
        folder. Then all blobs that are left in it are kept.

        Args:
            adapter: the kept version.
            newest: the agent's newest manifest, where the chain begins; None if it is not known.
            folder: names of all blobs in the version's folder.
        """
        ref = newest
        try:
            while ref is not None:
                manifest = decode_as(Manifest, await self._blobs.get(ref), ref.name)
                if manifest.version == adapter.version:
                    return {ref.name, *(file.name for file in manifest.files.values())}
                ref = manifest.parent
        except (BlobMissing, BlobCorrupt) as error:
            log.warning("cannot read the manifests of %s, all its blobs are kept: %s", adapter, error)
        return set(folder)

    async def _delete_document(self) -> None:
        """Remove the document, unless a later job has replaced it."""
        key = FencedKey(await self._bus.bucket(subjects.JOBS), self._ref.key)
        data = await key.read()
        if data is None:
            return
        document = decode_as(JobDocument, data, f"the JobDocument of key {self._ref.key}")
        if document.uid != self._ref.uid or not document.deleted:
            return
        try:
            await key.delete()
        except Overtaken:
            log.info("kept the document of job %s: another job has replaced it", self._ref)


async def delete(
    context: RoleContext, progress_store: ProgressStore, reports: Reports, job: DeletedJob, slots: asyncio.Semaphore
) -> None:
    """Delete a job. A MarlaasError is logged, and the deletion is retried until nothing of the job is left.

    Args:
        reports: returns the latest reports of all replicas.
        slots: semaphore that limits how many deletions run at once.
    """
    deletion = Deletion(context, progress_store, reports, job)

    async def run() -> None:
        async with slots:
            await deletion.run()

    name = f"deleting job {job.ref}"
    await patiently(run, name, RETRY_S, longest_s=LONGEST_RETRY_S, retried=lambda _: True)
