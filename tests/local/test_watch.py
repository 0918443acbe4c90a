from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from marlaas.local.collection import Collector
from marlaas.local.display import JsonDisplay
from marlaas.local.folder import OutFolder, hold
from marlaas.local.watch import JobWatch, announce
from marlaas_api import subjects
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import Bus
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, Manifest, Phase, PolicyRecord
from marlaas_api.wire import encode


@dataclass
class Scene:
    bus: Bus
    blobs: MemoryBlobs
    folder: OutFolder

    def watch(self, *jobs: JobDocument) -> JobWatch:
        return JobWatch(self.bus, Collector(self.folder, self.bus, self.blobs), JsonDisplay(_Nowhere()), jobs, ())

    async def publish(self, document: JobDocument, progress_of: Callable[..., object]) -> None:
        """The job has succeeded with version 1."""
        files = {
            "adapter_model.safetensors": await self.blobs.put("x", "adapter_model.safetensors", document.job.encode())
        }
        identity = {"namespace": document.namespace, "job": document.job, "uid": document.uid, "agent": "policy"}
        body = {"version": 1, "step": 0, "parent": None, "rank": 8, "files": files, "state": None}
        manifest = Manifest(**identity, **body, tensor_digests={}, probes=())
        record = PolicyRecord(uid=document.uid, version=1, manifest=await self.blobs.put("x", "m", encode(manifest)))
        policies = await self.bus.bucket(subjects.POLICY)
        await policies.put(subjects.policy_key(document.namespace, document.job, "policy"), encode(record))
        done = progress_of(document, phase=Phase.SUCCEEDED, versions={"policy": 1}, step=3)
        await (await self.bus.bucket(subjects.PROGRESS)).put(document.ref.key, encode(done))


class _Nowhere:
    def write(self, _: str) -> None: ...
    def flush(self) -> None: ...


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    bus = MemoryServer().connect("test")
    await bus.ensure()
    with hold(tmp_path) as folder:
        yield Scene(bus, MemoryBlobs(), folder)
    await bus.close()


async def test_what_cannot_be_read_of_one_job_is_that_jobs_failure_alone(scene, document, progress_of):
    good, bad = document(), document("other")
    for job in (good, bad):
        await scene.publish(job, progress_of)
    (name,) = [name for name, data in scene.blobs.contents.items() if data == b"other"]
    scene.blobs.contents[name] = b"tampered"
    results = await scene.watch(good, bad).results()
    assert [result.phase for result in results] == [Phase.SUCCEEDED, Phase.FAILED]
    assert results[1].failure.reason == "ResultUnreadable"
    assert (scene.folder.job(good.ref) / "adapter" / "adapter_model.safetensors").read_bytes() == b"reverse"
    assert not (scene.folder.job(bad.ref) / "adapter").exists()


async def test_an_export_goes_where_the_job_says(scene, document, progress_of, tmp_path):
    job = document(spec={"export": {"path": str(tmp_path / "mine")}})
    await scene.publish(job, progress_of)
    await scene.watch(job).results()
    assert (tmp_path / "mine" / "adapter_model.safetensors").read_bytes() == b"reverse"


async def test_an_output_folder_that_takes_no_more_ends_the_run(scene, document, progress_of):
    job = document()
    await scene.publish(job, progress_of)
    scene.folder.job(job.ref).parent.mkdir(parents=True)
    scene.folder.job(job.ref).write_text("in the way")
    with pytest.raises(InvalidInput, match="a file exists where a folder is needed"):
        await scene.watch(job).results()


async def test_announcing_twice_changes_nothing_and_a_newer_document_replaces_the_older(scene, document):
    bucket = await scene.bus.bucket(subjects.JOBS)
    for _ in range(2):
        await announce(scene.bus, [document()])
    first = await bucket.get("team-a.reverse")
    await announce(scene.bus, [document(generation=2)])
    second = await bucket.get("team-a.reverse")
    assert (first.revision, second.revision) == (1, 2)


async def test_a_name_that_another_run_holds_is_refused(scene, document):
    await announce(scene.bus, [document(uid="theirs")])
    with pytest.raises(InvalidInput, match="already has a job team-a/reverse of another run"):
        await announce(scene.bus, [document()])
