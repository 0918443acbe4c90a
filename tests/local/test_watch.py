"""The adapters of a run's jobs: found, fetched and exported; and the results of its jobs."""

import asyncio
import io
import json
from dataclasses import dataclass

import pytest
from tests.harness import a_manifest, pool_document, working

from marlaas.local.adapter import complete, export, fetch
from marlaas.local.collection import Collector
from marlaas.local.display import JsonDisplay
from marlaas.local.folder import OutFolder, hold
from marlaas.local.supervisor import Supervisor
from marlaas.local.watch import JobWatch, Observation
from marlaas.models import prepare
from marlaas_api import subjects
from marlaas_api.blobs import BlobCorrupt, BlobFull
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import Bus
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import JobDocument, Phase, PolicyRecord, ReplicaReport
from marlaas_api.policy_manifest import find_manifest
from marlaas_api.wire import encode
from marlaas_worker.adapters import AdapterConfig, tensor_name, write_adapter

FILE = "adapter_model.safetensors"


async def publish(bus, blobs, document, *contents: bytes, agent="policy"):
    parent = None
    for version, content in enumerate(contents):
        files = {FILE: await blobs.put("team-a", FILE, content)}
        manifest = a_manifest(document, version, agent=agent, parent=parent, files=files)
        parent = await blobs.put("team-a", "manifest", encode(manifest))
    bucket = await bus.bucket(subjects.POLICY)
    record = PolicyRecord(uid=document.uid, version=len(contents) - 1, manifest=parent)
    await bucket.put(subjects.policy_key(document.namespace, document.job, agent), encode(record))


@dataclass
class Scene:
    bus: Bus
    blobs: MemoryBlobs
    folder: OutFolder

    def watch(self, *jobs: JobDocument):
        return JobWatch(self.bus, Collector(self.folder, self.bus, self.blobs), JsonDisplay(io.StringIO()), jobs, ())

    async def publish(self, document, progress_of):
        await publish(self.bus, self.blobs, document, b"v0", document.job.encode())
        done = progress_of(document, phase=Phase.SUCCEEDED, versions={"policy": 1}, step=3)
        await (await self.bus.bucket(subjects.PROGRESS)).put(document.ref.key, encode(done))


@pytest.fixture
def scene(tmp_path, bus, blobs):
    with hold(tmp_path) as folder:
        yield Scene(bus, blobs, folder)


async def test_what_cannot_be_read_of_one_job_is_that_jobs_failure_alone(scene, document, progress_of):
    good, bad = document(), document("other")
    for job in (good, bad):
        await scene.publish(job, progress_of)
    (name,) = [name for name, data in scene.blobs.contents.items() if data == b"other"]
    scene.blobs.contents[name] = b"tampered"
    results = await scene.watch(good, bad).results()
    assert [result.phase for result in results] == [Phase.SUCCEEDED, Phase.FAILED]
    assert results[1].failure.reason == "ResultUnreadable"
    assert (scene.folder.job(good.ref) / "adapter" / FILE).read_bytes() == b"reverse"
    assert not (scene.folder.job(bad.ref) / "adapter").exists()


async def test_results_that_a_failing_store_keeps_back_are_waited_for(scene, document, progress_of):
    job, nothing_runs = document(), Supervisor(None, None)
    await scene.publish(job, progress_of)
    watch, scene.blobs.failure = scene.watch(job), BlobFull("full")
    async with working(watch.follow()):
        assert await watch.poll(nothing_runs)
        assert watch.display._waiting == "waiting for the blob store, to write the results: full"
        scene.blobs.failure = None
        assert not await watch.poll(nothing_runs)
    assert (await watch.results())[0].phase is Phase.SUCCEEDED
    assert (scene.folder.job(job.ref) / "adapter" / FILE).read_bytes() == b"reverse"


async def test_an_admission_wakes_the_runner_at_once_and_other_progress_does_not(scene, document, progress_of):
    job = document()
    watch, bucket = scene.watch(job), await scene.bus.bucket(subjects.PROGRESS)
    async with working(watch.follow()), asyncio.timeout(20):
        for admitted in (False, True):
            await bucket.put(job.ref.key, encode(progress_of(job, phase=Phase.RUNNING, admitted=admitted)))
            await watch.moved.wait()
            watch.moved.clear()
        await bucket.put(job.ref.key, encode(progress_of(job, phase=Phase.RUNNING, admitted=True, step=2)))
        assert (await watch.results())[0].progress.step == 2
    assert not watch.moved.is_set()


def test_a_warning_about_a_pools_template_is_a_line_of_the_run_once(scene, document):
    watch = scene.watch(document())
    report = {"role": "rollout", "pool": "tiny", "notices": {"TemplateRewritesPast": "it trims"}}
    watch.seen = Observation(reports=tuple(ReplicaReport(**report, replica=name) for name in ("r-0", "r-1")))
    assert list(watch._new_warnings()) == ["pool tiny: TemplateRewritesPast: it trims"]
    watch.replace((document(),))
    assert list(watch._new_warnings()) == []


async def test_each_policy_has_folders_for_its_adapter_and_export(scene, document, progress_of, tmp_path):
    agents = [{"name": "solver"}, {"name": "critic"}, {"name": "second", "policy": {"of": "solver"}}]
    job = document(spec={"agents": agents, "export": {"path": str(tmp_path / "mine")}})
    for agent, versions in (("solver", (b"v0", b"v1", b"solver 2")), ("critic", (b"critic 0",))):
        await publish(scene.bus, scene.blobs, job, *versions, agent=agent)
    newest, promoted = {"solver": 2, "critic": 0}, {"solver": 1, "critic": 0}
    done = progress_of(job, phase=Phase.SUCCEEDED, versions=newest, promoted=promoted, step=3)
    for progress, solver in ((progress_of(job, versions=newest), b"solver 2"), (done, b"v1")):
        await (await scene.bus.bucket(subjects.PROGRESS)).put(job.ref.key, encode(progress))
        await scene.watch(job).results()
        folder = scene.folder.job(job.ref) / "adapter"
        found = {path.name: (path / FILE).read_bytes() for path in folder.iterdir()}
        assert found == {"solver": solver, "critic": b"critic 0"}
        assert (tmp_path / "mine").exists() is progress.phase.final
    exported = {path.name: (path / FILE).read_bytes() for path in (tmp_path / "mine").iterdir()}
    assert exported == {"solver": b"v1", "critic": b"critic 0"}


async def test_an_output_folder_that_takes_no_more_ends_the_run(scene, document, progress_of):
    job = document()
    await scene.publish(job, progress_of)
    scene.folder.job(job.ref).parent.mkdir(parents=True)
    scene.folder.job(job.ref).write_text("in the way")
    with pytest.raises(InvalidInput, match="a file exists where a folder is needed"):
        await scene.watch(job).results()


async def test_any_version_is_found_and_replaces_the_folder_and_a_corrupt_one_does_not(bus, blobs, document, tmp_path):
    assert await find_manifest(bus, blobs, document(), "policy", 0) is None
    await publish(bus, blobs, document(), b"v0", b"v1", b"v2")
    for version in range(3):
        found = await find_manifest(bus, blobs, document(), "policy", version)
        await fetch(blobs, found, tmp_path / "adapter")
        assert (tmp_path / "adapter" / FILE).read_bytes() == b"v%d" % version
        assert {path.name for path in (tmp_path / "adapter").iterdir()} == {FILE}
        (tmp_path / "adapter" / "stray").touch()
    ref = found.files[FILE].model_copy(update={"sha256": "0" * 64})
    with pytest.raises(BlobCorrupt):
        await fetch(blobs, found.model_copy(update={"files": {FILE: ref}}), tmp_path / "adapter")
    assert (tmp_path / "adapter" / FILE).read_bytes() == b"v2"
    assert await find_manifest(bus, blobs, document(), "policy", 5) is None
    assert await find_manifest(bus, blobs, document(uid="later"), "policy", 0) is None


def test_an_export_is_a_plain_copy_where_the_job_asked_for_it(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for _ in range(2):
        export(tmp_path / "adapter", str(tmp_path / "models" / "mine"), "")
    assert [path.name for path in (tmp_path / "models" / "mine").iterdir()] == ["adapter_config.json"]


@pytest.mark.parametrize("place", ["mine", "file", "file/below"])
def test_an_export_deletes_nothing_that_is_no_adapter(tmp_path, place):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match=r"^spec\.export\.path: the trained adapter is in .* cannot be copied to "):
        export(tmp_path / "adapter", str(tmp_path / place), "")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "file").is_file()


def test_peft_and_transformers_open_the_folder_of_an_adapter_alone(tmp_path):
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    tiny = prepare("tiny")
    config = json.loads((tiny / "config.json").read_text())
    size, tensors = config["hidden_size"], {}
    for layer in range(config["num_hidden_layers"]):
        module = f"model.layers.{layer}.self_attn.q_proj"
        tensors |= {tensor_name(module, "A"): torch.ones(2, size), tensor_name(module, "B"): torch.ones(size, 2)}
    for name, data in write_adapter(tensors, AdapterConfig(2, 4, "tiny")).items():
        (tmp_path / name).write_bytes(data)
    complete(tmp_path, pool_document(tiny))
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    loaded = [value for name, value in model.named_parameters() if "lora_B" in name]
    assert [value.sum().item() for value in loaded] == [2.0 * size] * config["num_hidden_layers"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"


def test_a_model_of_the_hub_is_named_with_its_revision(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    pool = pool_document(tmp_path / "cache")
    model = type(pool.spec.model)(hub={"id": "Qwen/Qwen3-0.6B", "revision": "0" * 40})
    complete(tmp_path, pool.model_copy(update={"spec": pool.spec.model_copy(update={"model": model})}))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config == {"r": 8, "base_model_name_or_path": "Qwen/Qwen3-0.6B", "revision": "0" * 40}
