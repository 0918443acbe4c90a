"""Cache of published adapter versions: finds a version's manifest and downloads its files.

The agent's policy record (in the bucket `policy`) names the newest manifest, and each manifest names that of its parent version, so every
version can be reached. A manifest of another adapter or version than expected is refused.
"""

import asyncio
import shutil
from pathlib import Path

from marlaas_api import wire
from marlaas_api.background import await_all
from marlaas_api.blobs import BlobRef, Blobs
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.messages import Manifest
from marlaas_api.names import AdapterRef, JobRef
from marlaas_worker.rollout.policies import Policies
from marlaas_worker.rollout.served_jobs import ServedJobs

_MANIFEST_BYTES, _MANIFEST_FACTOR = 4096, 2.5
"""A cached manifest takes so many bytes of memory, plus this multiple of its encoded length. Both measured."""


class NotPublished(Retryable):
    """The agent's policy record is missing, names no manifest, or names that of an older version. The version may be published later."""


class WrongManifest(Permanent):
    """A policy record or a parent pointer names another manifest than expected, or the chain of parents does not contain the version."""


class AdapterCache:
    """Cache of manifests, in memory (`ServedJob.manifests`), and of adapter files, below `folder`.

    `fetch` downloads the files of a version before the engine loads it. They stay until `discard`, after the engine has unloaded it.

    Args:
        policies: source of the agents' policy records.
        jobs: hold the cached manifests of each job.
        blobs: the store with manifests and adapter files.
        folder: local folder of the downloaded files.
    """

    def __init__(self, policies: Policies, jobs: ServedJobs, blobs: Blobs, folder: Path) -> None:
        self._policies = policies
        self._jobs = jobs
        self._blobs = blobs
        self._folder = folder

    async def empty(self) -> None:
        """Remove all adapter files in the folder, which an earlier process may have left there."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def place(self, adapter: AdapterRef) -> Path:
        """Return the folder of a version's files; it never holds files of another version."""
        return self._folder / _folder_of(adapter.job_ref) / adapter.engine_name

    async def manifest(self, adapter: AdapterRef) -> Manifest:
        """Return a version's manifest. Raises NotPublished, WrongManifest, BusUnavailable, and errors of `Blobs.get`."""
        record = await self._policies.record(adapter)
        if record is None or record.manifest is None or record.version < adapter.version:
            known = "nothing" if record is None or record.manifest is None else f"v{record.version}"
            raise NotPublished(f"{adapter} is not published: the policy key has {known}")
        manifest = await self._read(adapter.job_ref, record.manifest)
        if manifest.adapter != (newest := adapter.at(record.version)):
            raise WrongManifest(f"the policy key of {newest} points to the manifest of {manifest.adapter}")
        while manifest.version > adapter.version:
            manifest = await self._parent(manifest)
        if manifest.version != adapter.version:
            raise WrongManifest(
                f"{adapter} was never published: the parents of its later versions lead to v{manifest.version}"
            )
        return manifest

    async def fetch(self, manifest: Manifest) -> Path:
        """Download a version's files, verify them, and return their folder.

        Raises the first error of `Blobs.fetch`, but only after all downloads have ended.
        """
        folder = self.place(manifest.adapter)
        files = manifest.files.items()
        await await_all([self._blobs.fetch(ref, folder / Path(name).name) for name, ref in files])
        return folder

    async def discard(self, adapter: AdapterRef) -> None:
        """Remove the files of a version that the engine no longer holds."""
        await asyncio.to_thread(shutil.rmtree, self.place(adapter), ignore_errors=True)

    async def discard_job(self, job: JobRef) -> None:
        """Remove the folder of a job that is gone. The folder may contain files that a cancelled download wrote after `discard`."""
        await asyncio.to_thread(shutil.rmtree, self._folder / _folder_of(job), ignore_errors=True)

    async def _parent(self, manifest: Manifest) -> Manifest:
        if manifest.parent is None:
            raise WrongManifest(f"{manifest.adapter} names no parent")
        parent = await self._read(manifest.adapter.job_ref, manifest.parent)
        if parent.adapter.agent_ref != manifest.adapter.agent_ref or parent.version >= manifest.version:
            raise WrongManifest(f"{manifest.adapter} names {parent.adapter} as its parent")
        return parent

    async def _read(self, job: JobRef, ref: BlobRef) -> Manifest:
        cached = self._jobs.of(job).manifests
        if (manifest := cached.get(ref.sha256)) is None:
            data = await self._blobs.get(ref)
            manifest = wire.decode_as(Manifest, data, ref.name)
            cached.put(ref.sha256, manifest, _MANIFEST_BYTES + int(_MANIFEST_FACTOR * len(data)))
        return manifest


def _folder_of(job: JobRef) -> str:
    return f"{job.key}.{job.uid}"
