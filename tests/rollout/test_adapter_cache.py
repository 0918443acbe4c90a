"""Caches of the rollout role are bounded in bytes, and by what lives; files of versions that the engine does not hold are removed."""

import asyncio
from types import SimpleNamespace

import pytest
from tests.harness import a_manifest

from marlaas_api.blobs import BlobRef, BlobUnavailable
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_worker.rollout.adapter_cache import AdapterCache
from marlaas_worker.rollout.bounded_cache import BoundedCache


class OneFails(MemoryBlobs):
    """A store that fails at once for the file `missing`, and writes any other file two rounds of the event loop later."""

    async def fetch(self, ref, target):
        if ref.name == "missing":
            raise BlobUnavailable("away")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"tensors")


def manifest(uid, **files):
    refs = {file: BlobRef(name=name, sha256="0" * 64, size_bytes=7) for file, name in files.items()}
    return a_manifest(SimpleNamespace(namespace="team", job="job", uid=uid), 1, files=refs)


async def test_no_download_runs_on_after_another_one_of_its_version_has_failed_and_files_of_gone_jobs_are_removed(
    tmp_path,
):
    files, lost = AdapterCache(None, OneFails(), tmp_path), manifest("u1", a="missing", b="slow")
    with pytest.raises(BlobUnavailable):
        await files.fetch(lost)
    await files.discard(lost.adapter)
    for _ in range(5):
        await asyncio.sleep(0)
    assert list(tmp_path.iterdir()) == []
    fetched = [await files.fetch(manifest(uid, a="slow")) for uid in ("gone", "here")]
    await files.forget({"gone"})
    assert list(tmp_path.iterdir()) == fetched[1:]


def test_a_cache_is_bounded_in_bytes_evicts_the_least_recently_used_and_forgets_what_is_gone():
    cache = BoundedCache(100)
    for key, num_bytes in (("a", 40), ("b", 30), ("c", 30)):
        cache.put(key, num_bytes, num_bytes)
    assert (cache.get("a"), cache.num_bytes) == (40, 100)
    cache.put("d", 50, 50)
    assert ([key in cache for key in "abcd"], cache.get("b"), cache.num_bytes) == ([True, False, False, True], None, 90)
    cache.put("a", "new", 45)
    assert (cache.get("a"), cache.num_bytes, len(cache)) == ("new", 95, 2)
    cache.forget(lambda key, value: value == 50)
    assert (cache.get("d"), cache.num_bytes) == (None, 45)
    cache.put("large", 2, 500)
    assert (cache.get("a"), cache.get("large"), cache.num_bytes) == (None, 2, 500), "one is kept, however large"
