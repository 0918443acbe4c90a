"""Attacks on delivery: whatever reaches the engine instead of the published version is found out, named, and never served."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.rollout.conftest import Published

from marlaas_api.messages import Manifest
from marlaas_api.wire import pack_logprobs, unpack_logprobs
from marlaas_worker.adapters import CONFIG_FILE, TENSORS_FILE
from marlaas_worker.rollout.engine import Engine, LoadedAdapter, LoadFailed, Sampling
from marlaas_worker.rollout.proof import Check, ProofFailed, load_proven

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = np.array([5, 9, 23, 40], dtype=np.int32)
Attack = Callable[[Callable[..., Published], Path], tuple[Manifest, Path]]
"""Returns the manifest that is committed, and the folder that reaches the engine."""


def copy_of(published: Published, folder: Path) -> Path:
    return Path(shutil.copytree(published.folder, folder / "copy"))


def with_probes(published: Published, change: Callable[[Any], Any]) -> Manifest:
    """The manifest with other logprobs of its probe."""
    probe = published.manifest.probes[0]
    changed = pack_logprobs(change(unpack_logprobs(probe.logprobs)).astype(np.float32))
    return published.manifest.model_copy(update={"probes": (probe.model_copy(update={"logprobs": changed}),)})


async def test_what_was_published_is_proven_and_then_serves(harness, publish):
    for version, size in ((0, 0.0), (1, 0.2)):
        published = publish(3, version, size)
        adapter = harness.slot_for(published)
        proof = await load_proven(harness.engine, published.manifest, adapter)
        assert proof.digest == published.manifest.tensor_digests["float32"]
        assert proof.probe_gap < 1e-4
        assert (await harness.engine.generate("served", adapter, PROMPT, Sampling(1.0, 1, 0))).output_ids


def a_corrupted_file(publish, tmp_path):
    folder = copy_of(publish(3), tmp_path)
    data = bytearray((folder / TENSORS_FILE).read_bytes())
    data[-5] ^= 1
    (folder / TENSORS_FILE).write_bytes(data)
    return publish(3).manifest, folder


def a_missing_file(publish, tmp_path):
    folder = copy_of(publish(3), tmp_path)
    (folder / CONFIG_FILE).unlink()
    return publish(3).manifest, folder


def another_adapter_of_equal_shape(publish, tmp_path):
    return publish(3).manifest, publish(4).folder


def another_adapter_whose_files_pass(publish, tmp_path):
    other = publish(4)
    return publish(3).manifest.model_copy(update={"files": other.manifest.files}), other.folder


def a_neighbouring_version_that_probes_cannot_tell(publish, tmp_path):
    stale = publish(3, 1, 1e-5)
    return publish(3, 2, 1e-5).manifest.model_copy(update={"files": stale.manifest.files}), stale.folder


def no_digest_for_the_engines_dtype(publish, tmp_path):
    published = publish(3)
    return published.manifest.model_copy(update={"tensor_digests": {}}), published.folder


def no_probes(publish, tmp_path):
    published = publish(3)
    return published.manifest.model_copy(update={"probes": ()}), published.folder


def logprobs_unlike_the_trainers(publish, tmp_path):
    published = publish(3)
    return with_probes(published, lambda logprobs: logprobs + 0.01), published.folder


def logprobs_that_are_no_numbers(publish, tmp_path):
    published = publish(3)
    return with_probes(published, lambda logprobs: logprobs * float("nan")), published.folder


@pytest.mark.parametrize(
    ("attack", "check", "words"),
    [
        (a_corrupted_file, Check.FILES, "has sha256"),
        (a_missing_file, Check.FILES, CONFIG_FILE),
        (another_adapter_of_equal_shape, Check.FILES, "has sha256"),
        (another_adapter_whose_files_pass, Check.DIGEST, "of the engine has digest"),
        (a_neighbouring_version_that_probes_cannot_tell, Check.DIGEST, "of the engine has digest"),
        (no_digest_for_the_engines_dtype, Check.DIGEST, "expected None for float32"),
        (no_probes, Check.PROBES, "the manifest has no probes"),
        (logprobs_unlike_the_trainers, Check.PROBES, "1.00e-02 over 31 tokens, the tolerance in float32 is 1.00e-03"),
        (logprobs_that_are_no_numbers, Check.PROBES, "nan over 31 tokens"),
    ],
)
async def test_an_attack_is_found_and_the_engine_serves_nothing_of_it(
    harness, publish, tmp_path, attack: Attack, check, words
):
    manifest, folder = attack(publish, tmp_path)
    adapter = LoadedAdapter(manifest.adapter.engine_name, harness.next_slot(), folder)
    with pytest.raises(ProofFailed) as failure:
        await load_proven(harness.engine, manifest, adapter)
    assert (failure.value.check, words in str(failure.value)) == (check, True), str(failure.value)
    with pytest.raises(LoadFailed, match="not loaded"):
        await harness.engine.generate("after", adapter, PROMPT, Sampling(1.0, 1, 0))


async def test_a_file_that_this_machine_cannot_read_says_nothing_about_the_version(harness, publish, tmp_path):
    published = publish(3)
    folder = copy_of(published, tmp_path)
    (folder / TENSORS_FILE).unlink()
    (folder / TENSORS_FILE).mkdir()
    with pytest.raises(OSError, match=TENSORS_FILE):
        await load_proven(harness.engine, published.manifest, harness.slot_for(published, folder))


async def test_a_pointer_to_another_versions_manifest_is_refused(harness, publish):
    published, stale = publish(3, 2), publish(3, 1)
    with pytest.raises(ProofFailed, match=r"@v2.*@v1") as failure:
        await load_proven(harness.engine, stale.manifest, harness.slot_for(published))
    assert failure.value.check is Check.IDENTITY


async def test_an_adapter_whose_module_names_match_nothing_is_refused(harness, publish):
    published = publish(3, rename=lambda name: name.replace("model.layers", "model.decoder.layers"))
    adapter = harness.slot_for(published)
    with pytest.raises((ProofFailed, LoadFailed)):
        await load_proven(harness.engine, published.manifest, adapter)
    with pytest.raises(LoadFailed, match="not loaded"):
        await harness.engine.generate("after", adapter, PROMPT, Sampling(1.0, 1, 0))


async def test_a_later_version_with_the_weights_of_the_one_before_it_is_as_good_as_any(harness, publish):
    """A step without a gradient is committed all the same: version 1 may be the zero adapter, and version 2 may equal version 1."""
    for version, size in ((1, 0.0), (1, 0.2)):
        before = publish(3, version, size)
        after = before.manifest.model_copy(update={"version": version + 1, "step": version})
        for manifest in (before.manifest, after):
            adapter = LoadedAdapter(manifest.adapter.engine_name, harness.next_slot(), before.folder)
            proof = await load_proven(harness.engine, manifest, adapter)
            assert proof.digest == before.manifest.tensor_digests["float32"]
            await harness.engine.unload(adapter)


async def test_the_tolerance_is_the_manifests(harness, publish):
    published = publish(3)
    moved = with_probes(published, lambda logprobs: logprobs + 0.01)
    await load_proven(harness.engine, moved.model_copy(update={"probe_tolerance": 0.02}), harness.slot_for(published))


class Silent:
    """An engine that loads, and then never tells the digest."""

    def __init__(self, engine: Any) -> None:
        self.limits, self._engine, self.unload = engine.limits, engine, engine.unload
        self.asked = asyncio.Event()

    async def load(self, adapter: LoadedAdapter) -> str:
        await self._engine.load(adapter)
        self.asked.set()
        await asyncio.Event().wait()
        return ""


async def test_cancelling_a_proof_leaves_the_slot_free(harness, publish):
    published = publish(3)
    adapter, silent = harness.slot_for(published), Silent(harness.engine)
    proving = asyncio.create_task(load_proven(cast(Engine, silent), published.manifest, adapter))
    await silent.asked.wait()
    proving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await proving
    with pytest.raises(LoadFailed, match="not loaded"):
        await harness.engine.digest(adapter)
