"""Attacks on delivery: whatever reaches the engine instead of the published version is found out, named, and never served."""

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from marlaas_api.wire import pack_logprobs, unpack_logprobs
from marlaas_worker.adapters import CONFIG_FILE, TENSORS_FILE
from marlaas_worker.rollout.engine import LoadedAdapter, LoadFailed, Sampling
from marlaas_worker.rollout.proof import Check, ProofFailed, load_proven

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = np.array([5, 9, 23, 40], dtype=np.int32)


def with_probes(published, change):
    probe = published.manifest.probes[0]
    changed = pack_logprobs(change(unpack_logprobs(probe.logprobs)).astype(np.float32))
    return published.manifest.model_copy(update={"probes": (probe.model_copy(update={"logprobs": changed}),)})


async def test_what_was_published_is_proven_within_the_manifests_tolerance_and_then_serves(harness, publish):
    """A step without a gradient is committed all the same: version 1 may be the zero adapter, and version 2 may equal version 1."""
    zero, one, moved = publish(3, 1, 0.0), publish(3), with_probes(publish(3), lambda logprobs: logprobs + 0.01)
    made = [(of, of.manifest, {"version": version, "step": version - 1}) for of in (zero, one) for version in (1, 2)]
    for published, manifest, changes in (*made, (one, moved, {"probe_tolerance": 0.02})):
        manifest = manifest.model_copy(update=changes)
        adapter = LoadedAdapter(manifest.adapter.engine_name, harness.next_slot(), published.folder)
        proof = await load_proven(harness.engine, manifest, adapter)
        assert proof.digest == published.manifest.tensor_digests["float32"]
        assert proof.probe_gap < (0.02 if manifest.probe_tolerance == 0.02 else 1e-4)
        assert (await harness.engine.generate("served", adapter, PROMPT, Sampling(1.0, 1, 0))).output_ids
        await harness.engine.unload(adapter)


def file_changed(change):
    def attack(publish, tmp_path):
        folder = Path(shutil.copytree(publish(3).folder, tmp_path / "copy"))
        change(folder)
        return publish(3).manifest, folder

    return attack


def corrupt(folder):
    data = bytearray((folder / TENSORS_FILE).read_bytes())
    data[-5] ^= 1
    (folder / TENSORS_FILE).write_bytes(data)


def unreadable(folder):
    (folder / TENSORS_FILE).unlink()
    (folder / TENSORS_FILE).mkdir()


def manifest_with(**update):
    return lambda publish, tmp_path: (publish(3).manifest.model_copy(update=update), publish(3).folder)


def logprobs(change):
    return lambda publish, tmp_path: (with_probes(publish(3), change), publish(3).folder)


def files_of(seed, version=1, size=0.2, of_version=1):
    def attack(publish, tmp_path):
        other = publish(seed, version, size)
        return publish(3, of_version, size).manifest.model_copy(update={"files": other.manifest.files}), other.folder

    return attack


TOO_FAR = "1.00e-02 over 31 tokens, the tolerance in float32 is 1.00e-03"
ATTACKS = {
    "a corrupted file": (file_changed(corrupt), Check.FILES, "has sha256"),
    "a missing file": (file_changed(lambda folder: (folder / CONFIG_FILE).unlink()), Check.FILES, CONFIG_FILE),
    "another adapter": (lambda publish, _: (publish(3).manifest, publish(4).folder), Check.FILES, "has sha256"),
    "another adapter whose files pass": (files_of(4), Check.DIGEST, "of the engine has digest"),
    "a version that probes cannot tell": (files_of(3, 1, 1e-5, 2), Check.DIGEST, "of the engine has digest"),
    "no digest": (manifest_with(tensor_digests={}), Check.DIGEST, "expected None for float32"),
    "no probes": (manifest_with(probes=()), Check.PROBES, "the manifest has no probes"),
    "other logprobs": (logprobs(lambda values: values + 0.01), Check.PROBES, TOO_FAR),
    "logprobs that are no numbers": (logprobs(lambda values: values * np.nan), Check.PROBES, "nan over 31 tokens"),
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_found_and_the_engine_serves_nothing_of_it(harness, publish, tmp_path, name):
    attack, check, words = ATTACKS[name]
    manifest, folder = attack(publish, tmp_path)
    adapter = LoadedAdapter(manifest.adapter.engine_name, harness.next_slot(), folder)
    with pytest.raises(ProofFailed) as failure:
        await load_proven(harness.engine, manifest, adapter)
    assert (failure.value.check, words in str(failure.value)) == (check, True), str(failure.value)
    with pytest.raises(LoadFailed, match="not loaded"):
        await harness.engine.generate("after", adapter, PROMPT, Sampling(1.0, 1, 0))


async def test_another_manifest_and_unknown_names_are_refused_but_no_unreadable_file(harness, publish, tmp_path):
    """A file that this machine cannot read says nothing about the version."""
    with pytest.raises(ProofFailed, match=r"@v2.*@v1") as failure:
        await load_proven(harness.engine, publish(3, 1).manifest, harness.slot_for(publish(3, 2)))
    assert failure.value.check is Check.IDENTITY
    renamed = publish(3, rename=lambda name: name.replace("model.layers", "model.decoder.layers"))
    adapter = harness.slot_for(renamed)
    with pytest.raises((ProofFailed, LoadFailed)):
        await load_proven(harness.engine, renamed.manifest, adapter)
    with pytest.raises(LoadFailed, match="not loaded"):
        await harness.engine.generate("after", adapter, PROMPT, Sampling(1.0, 1, 0))
    manifest, folder = file_changed(unreadable)(publish, tmp_path)
    with pytest.raises(OSError, match=TENSORS_FILE):
        await load_proven(harness.engine, manifest, harness.slot_for(publish(3), folder))


async def test_probes_that_fail_are_scored_once_more_before_a_version_is_refused(reference, publish):
    """A batch of another size may run other kernels, which round otherwise."""
    await reference.start()
    scored = [0]

    async def score(adapter, ids):
        scored[0] += 1
        return await reference.score(adapter, ids) + (0.5 if scored[0] <= len(published.manifest.probes) else 0.0)

    published = publish(3)
    adapter = LoadedAdapter(published.manifest.adapter.engine_name, 7001, published.folder)
    engine = SimpleNamespace(limits=reference.limits, load=reference.load, unload=reference.unload, score=score)
    assert (await load_proven(engine, published.manifest, adapter)).probe_gap < 1e-4
    await reference.unload(adapter)


async def test_cancelling_a_proof_leaves_the_slot_free(harness, publish):
    published, loaded = publish(3), asyncio.Event()
    adapter, engine = harness.slot_for(published), harness.engine

    async def load(adapter):
        await engine.load(adapter)
        loaded.set()
        await asyncio.Event().wait()  # it never tells the digest

    silent = SimpleNamespace(limits=engine.limits, unload=engine.unload, load=load)
    proving = asyncio.create_task(load_proven(silent, published.manifest, adapter))
    await loaded.wait()
    proving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await proving
    with pytest.raises(LoadFailed, match="not loaded"):
        await engine.digest(adapter)
