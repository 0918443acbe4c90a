"""Slots of the engine, the versions in them, their charges and their failed loads; and the files of adapters."""

import asyncio
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.harness import a_manifest, job_document
from tests.tables import rows

from marlaas_api.blobs import BlobRef, BlobRefused, BlobUnavailable
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import BusRefused
from marlaas_api.errors import Permanent, Retryable
from marlaas_api.names import AgentRef, JobRef
from marlaas_worker.rollout.adapter_cache import AdapterCache
from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed, Residents
from marlaas_worker.rollout.served_jobs import GONE_S, ServedJobs
from marlaas_worker.rollout.slots import ProvenVersions, VersionState
from marlaas_worker.rollout.versions import FIRST_WAIT_S, LONGEST_WAIT_S, failed_load

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


def job_ref(uid):
    return JobRef("team-a", "sums", uid)


def test_every_version_counts_for_its_agent_from_its_load_until_its_slot_is_free_and_a_job_that_is_gone_leaves_nothing():
    jobs = ServedJobs()
    proven = ProvenVersions(9, count(1), jobs)

    def version(uid, number, agent="policy"):
        return proven.version(AgentRef(job_ref(uid), agent).adapter(number))

    def totals(now):
        return {job.ref.uid: job.slot_s(now) for job in jobs}

    for uid, number, agent, now in rows(__file__, "loaded_versions"):
        proven.begin(version(uid, number, agent), Path("nowhere"), now)
    assert totals(14.0) == {"a": {"policy": 6.0, "critic": 1.5}, "b": {"policy": 1.0}}
    for now in (15.0, 99.0):
        proven.remove(version("a", 1), VersionState.UNLOADING, now)
    assert totals(16.0) == {"a": {"policy": 9.0, "critic": 3.5}, "b": {"policy": 3.0}}
    proven.clear(17.0)
    assert totals(20.0) == {"a": {"policy": 10.0, "critic": 4.5}, "b": {"policy": 4.0}}
    proven.begin(version("a", 2), Path("nowhere"), 25.0)
    for served, now in (("b", 26.0), ("a", 30.0)):
        for one in proven.resident.values():
            one.charge_slot(one.agent.ref.job == job_ref(served), now)
    assert totals(32.0)["a"] == {"policy": 13.0, "critic": 4.5}, "nobody pays for what an idle slot still holds"
    for now in (32.0, 32.0 + GONE_S):
        jobs.drop_gone({job_ref("b")}, now)
    assert totals(34.0) == {"b": {"policy": 4.0}}


PASSING = [Retryable("away"), BlobRefused("expired"), BusRefused("no permission"), RuntimeError("no thread"), OSError()]


@pytest.mark.parametrize("error", PASSING)
def test_a_load_that_may_succeed_later_is_tried_again_ever_more_rarely(error):
    failures = [failed_load(None, error, 100.0)]
    for _ in range(11):
        failures.append(failed_load(failures[-1], error, 100.0))
    waits = [failure.retry_at - 100.0 for failure in failures]
    assert waits[:3] == pytest.approx([FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S])
    assert waits[-1] == pytest.approx(LONGEST_WAIT_S)
    assert [failures[-1].may_try(now) for now in (109.0, 110.1)] == [False, True]


@pytest.mark.parametrize("error", [Permanent("corrupt"), KeyError("adapter_model.safetensors")])
def test_a_load_that_never_succeeds_is_refused_until_everything_begins_anew(error):
    version = ProvenVersions(1, count(1), ServedJobs()).version(AgentRef(job_ref("a"), "policy").adapter(1))
    version.failure = failed_load(None, error, 0.0)
    assert (version.failure.retry_at, version.may_load(1e9)) == (None, False)
    version.restart(0.0)
    assert version.may_load(0.0)
