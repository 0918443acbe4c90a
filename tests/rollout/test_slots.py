"""Slots of the engine and the versions in them, and caches that are bounded in bytes and by what lives."""

import asyncio
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.harness import a_manifest, job_document

from marlaas_api.blobs import BlobRef, BlobUnavailable
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_worker.rollout.adapter_cache import AdapterCache
from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed, Residents
from marlaas_worker.rollout.served_jobs import BoundedCache, CacheBound, ServedJobs
from marlaas_worker.rollout.slots import ProvenVersions, VersionState

NOWHERE = Path("nowhere")


def a_version(proven, number=1, job=None):
    """A version of a job, with its manifest."""
    manifest = a_manifest(job or job_document(), number)
    return proven.version(manifest.adapter), manifest


def test_a_version_serves_only_once_it_is_ready_and_is_never_given_up_in_use():
    proven = ProvenVersions(2, count(1), ServedJobs())
    (one, manifest), (other, _) = a_version(proven, 1), a_version(proven, 2)
    slot = proven.begin(one, NOWHERE, 0.0)
    with proven.hold(one.adapter) as used:
        assert used is None
    proven.add(one, manifest)
    with proven.hold(one.adapter) as used:
        assert used is slot
        proven.begin(other, NOWHERE, 0.0)
        with pytest.raises(LoadFailed, match="still runs 1"):
            proven.remove(one, VersionState.UNLOADING, 0.0)
        with pytest.raises(LoadFailed, match="2 of 2 are taken"):
            proven.begin(a_version(proven, 3)[0], NOWHERE, 0.0)
        found = [(version.state, version.slot.num_running) for version in proven.resident.values()]
        assert found == [("proven", 1), ("loading", 0)]
        proven.clear(1.0)
        again = proven.begin(one, NOWHERE, 1.0)
        assert again.loaded.slot_id != slot.loaded.slot_id, "numbers are never used twice, not even after a restart"
        proven.add(one, manifest)
    with proven.hold(one.adapter) as used:
        assert used is again
        assert again.num_running == 1


async def test_requests_in_the_engines_queue_do_not_keep_a_slot_and_lose_a_version_that_is_revoked():
    jobs = ServedJobs()
    proven = ProvenVersions(1, count(1), jobs)
    version, manifest = a_version(proven)
    adapter, name = version.adapter, version.name
    slot = proven.begin(version, NOWHERE, 0.0)
    proven.add(version, manifest)

    def running():
        with proven.hold(adapter) as held:
            return None if held is None else held.num_running

    async with proven.queue(adapter, "team-a"):
        assert (slot.num_queued, slot.num_running) == (1, 0)
        proven.yield_slots(frozenset({name}))
        assert running() == 1
        proven.yield_slots(frozenset({name}), revoked=frozenset({name}))
        assert running() is None
        proven.remove(version, VersionState.UNLOADING, 0.0)
        assert running() is None
    assert version.agent.tenant == "team-a"
    proven.prefer(())
    assert version.agent.tenant == ""


def held(name, slot_id):
    return LoadedAdapter(name, slot_id, NOWHERE)


def refused(residents, name, slot_id):
    with pytest.raises(LoadFailed) as error:
        residents.admit(held(name, slot_id))
    return str(error.value)


def test_an_engine_refuses_a_full_house_a_name_twice_and_an_old_number_of_which_it_keeps_a_bit():
    residents = Residents(2)
    residents.admit(held("a", 1))
    assert "loaded already" in refused(residents, "a", 2)
    residents.admit(held("b", 2))
    assert "all 2" in refused(residents, "c", 3)
    assert [residents.remove(held("a", 1)) for _ in range(2)] == [True, False]
    assert "used before" in refused(residents, "a", 1)
    residents.admit(held("a", 3))
    with residents.using(held("a", 3)):
        residents.clear()  # a request that ends after a restart disturbs nothing
        residents.admit(held("a", 4))
    assert residents.remove(held("a", 4))
    residents = Residents(2)
    for number in range(1, 8001):
        residents.admit(held("a", number))
        with residents.using(held("a", number)):
            pass
        residents.remove(held("a", number))
    assert (len(residents._past), len(residents._held), len(residents._running)) == (1001, 0, 0)
    assert all("used before" in refused(residents, "a", number) for number in (1, 4321, 8000))


async def test_a_new_group_is_not_sampled_from_a_version_that_is_too_old():
    """After a restart of the engine, a request for a past version may be served before the newest version is."""
    job = job_document()
    past, newest = (a_manifest(job, version).adapter for version in (2, 10))
    proven = ProvenVersions(2, count(1), ServedJobs())
    proven.prefer([newest])

    def serve(number):
        version, manifest = a_version(proven, number, job)
        proven.begin(version, NOWHERE, 0.0)
        proven.add(version, manifest)

    serve(2)
    assert await proven.newest_of(past.agent_ref, "team-a", max_staleness=8) == 2
    waiting = asyncio.create_task(proven.newest_of(past.agent_ref, "team-a", max_staleness=7))
    await asyncio.sleep(0)
    assert list(proven.waiting) == [newest]
    serve(10)
    assert await waiting == 10


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


async def test_no_download_runs_on_after_another_failed_and_files_of_gone_jobs_go(tmp_path):
    files, lost = AdapterCache(None, ServedJobs(), OneFails(), tmp_path), manifest("u1", a="missing", b="slow")
    with pytest.raises(BlobUnavailable):
        await files.fetch(lost)
    await files.discard(lost.adapter)
    for _ in range(5):
        await asyncio.sleep(0)
    assert list(tmp_path.glob("*/*")) == []
    gone, here = [await files.fetch(manifest(uid, a="slow")) for uid in ("gone", "here")]
    await files.discard_job(manifest("gone").adapter.job_ref)
    assert list(tmp_path.glob("*/*")) == [here]
    assert not gone.parent.exists()


def test_caches_are_bounded_in_bytes_together_and_evict_the_least_recently_used():
    bound = CacheBound(100)
    cache, other = BoundedCache(bound), BoundedCache(bound)
    for key, num_bytes in (("a", 40), ("b", 30), ("c", 30)):
        cache.put(key, num_bytes, num_bytes)
    assert (cache.get("a"), bound.num_bytes) == (40, 100)
    other.put("d", 50, 50)
    assert ([key in cache for key in "abcd"], cache.get("b"), bound.num_bytes) == (
        [True, False, False, False],
        None,
        90,
    )
    cache.put("a", "new", 45)
    assert (cache.get("a"), bound.num_bytes, len(cache), len(other)) == ("new", 95, 1, 1)
    bound.trim(lambda value: value == 50)
    assert (other.get("d"), cache.get("a"), bound.num_bytes) == (None, "new", 45)
    other.put("d", 1, 1)
    other.clear()
    assert (len(other), bound.num_bytes) == (0, 45)
    cache.put("large", 2, 500)
    assert (cache.get("a"), cache.get("large"), bound.num_bytes) == (None, 2, 500), "one is kept, however large"
