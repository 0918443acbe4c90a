"""`AdapterCache` leaves no files of versions that the engine does not hold."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.harness import a_manifest

from marlaas_api.blobs import BlobRef, BlobUnavailable
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.messages import Manifest
from marlaas_worker.rollout.adapter_cache import AdapterCache
from marlaas_worker.rollout.policies import Policies


class OneFails(MemoryBlobs):
    """A store that fails at once for the file `missing`, and writes any other file two rounds of the event loop later."""

    async def fetch(self, ref: BlobRef, target: Path) -> None:
        if ref.name == "missing":
            raise BlobUnavailable("away")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        write(target)


def write(target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(b"tensors")


def folders(parent: Path) -> list[Path]:
    return list(parent.iterdir())


def manifest(uid: str, **files: BlobRef) -> Manifest:
    return a_manifest(SimpleNamespace(namespace="team", job="job", uid=uid), 1, files=files)


def ref(name: str) -> BlobRef:
    return BlobRef(name=name, sha256="0" * 64, size_bytes=7)


def cache(folder: Path) -> AdapterCache:
    return AdapterCache(cast(Policies, None), OneFails(), folder)


async def test_no_download_runs_on_after_another_one_of_its_version_has_failed(tmp_path: Path) -> None:
    files, lost = cache(tmp_path), manifest("u1", a=ref("missing"), b=ref("slow"))
    with pytest.raises(BlobUnavailable):
        await files.fetch(lost)
    await files.discard(lost.adapter)
    for _ in range(5):
        await asyncio.sleep(0)
    assert folders(tmp_path) == []


async def test_the_files_of_jobs_that_are_gone_are_removed_and_no_others(tmp_path: Path) -> None:
    files = cache(tmp_path)
    fetched = [await files.fetch(manifest(uid, a=ref("slow"))) for uid in ("gone", "here")]
    await files.forget({"gone"})
    assert folders(tmp_path) == fetched[1:]
