"""Attacks on delivery: whatever reaches the engine instead of the published version is found out, named, and never served."""

import asyncio
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from marlaas_api.messages import Manifest
from marlaas_api.wire import pack_logprobs, unpack_logprobs
from marlaas_worker.adapters import CONFIG_FILE, TENSORS_FILE
from marlaas_worker.rollout.engine import Engine, LoadedAdapter, LoadFailed, Sampling
from marlaas_worker.rollout.proof import Check, ProofFailed, load_proven

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = np.array([5, 9, 23, 40], dtype=np.int32)


def copy_of(published: Any, folder: Path) -> Path:
    return Path(shutil.copytree(published.folder, folder / "copy"))


async def refused(harness: Any, manifest: Manifest, adapter: LoadedAdapter) -> ProofFailed:
    """The failure; the adapter is out of the engine and serves nothing."""
    with pytest.raises(ProofFailed) as failure:
        await load_proven(harness.engine, manifest, adapter)
    with pytest.raises(LoadFailed, match="not loaded"):
        await harness.engine.generate("after", adapter, PROMPT, Sampling(1.0, 1, 0))
    return failure.value


async def test_what_was_published_is_proven_and_then_serves(harness, publish):
    for version, size in ((0, 0.0), (1, 0.2)):
        published = publish(3, version, size)
        adapter = harness.slot_for(published)
        proof = await load_proven(harness.engine, published.manifest, adapter)
        assert proof.digest == published.manifest.tensor_digests["float32"]
        assert proof.probe_gap < 1e-4
        assert (await harness.engine.generate("served", adapter, PROMPT, Sampling(1.0, 1, 0))).output_ids


async def test_a_corrupted_file_is_found_by_its_sha256(harness, publish, tmp_path):
    published = publish(3)
    folder = copy_of(published, tmp_path)
    data = bytearray((folder / TENSORS_FILE).read_bytes())
    data[-5] ^= 1
    (folder / TENSORS_FILE).write_bytes(data)
    failure = await refused(harness, published.manifest, harness.slot_for(published, folder))
    assert failure.check is Check.FILES
    assert TENSORS_FILE in str(failure)


async def test_a_file_that_this_machine_cannot_read_says_nothing_about_the_version(harness, publish, tmp_path):
    published = publish(3)
    folder = copy_of(published, tmp_path)
    (folder / TENSORS_FILE).unlink()
    (folder / TENSORS_FILE).mkdir()
    with pytest.raises(OSError, match=TENSORS_FILE):
        await load_proven(harness.engine, published.manifest, harness.slot_for(published, folder))


async def test_another_adapter_of_equal_shape_is_found_by_its_sha256(harness, publish):
    published, other = publish(3), publish(4)
    failure = await refused(harness, published.manifest, harness.slot_for(published, other.folder))
    assert failure.check is Check.FILES


async def test_another_adapter_of_equal_shape_is_found_in_the_slot_even_if_its_files_pass(harness, publish):
    published, other = publish(3), publish(4)
    forged = published.manifest.model_copy(update={"files": other.manifest.files})
    failure = await refused(harness, forged, harness.slot_for(published, other.folder))
    assert failure.check is Check.DIGEST
    assert published.manifest.tensor_digests["float32"] in str(failure)


async def test_a_neighbouring_version_is_found_although_probes_cannot_tell_it(harness, publish):
    published = publish(3, 2, 1e-5)
    stale = publish(3, 1, 1e-5)
    forged = published.manifest.model_copy(update={"files": stale.manifest.files})
    failure = await refused(harness, forged, harness.slot_for(published, stale.folder))
    assert failure.check is Check.DIGEST
    unseen = forged.model_copy(update={"tensor_digests": stale.manifest.tensor_digests})
    await load_proven(harness.engine, unseen, harness.slot_for(published, stale.folder))


async def test_a_pointer_to_another_versions_manifest_is_refused(harness, publish):
    published, stale = publish(3, 2), publish(3, 1)
    failure = await refused(harness, stale.manifest, harness.slot_for(published))
    assert failure.check is Check.IDENTITY
    assert "@v1" in str(failure)
    assert "@v2" in str(failure)


@pytest.mark.parametrize("rename", [lambda name: name.replace("model.layers", "model.decoder.layers")])
async def test_an_adapter_whose_module_names_match_nothing_is_refused(harness, publish, rename):
    published = publish(3, rename=rename)
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


async def test_logprobs_unlike_the_trainers_are_refused_with_the_numbers(harness, publish):
    published = publish(3)
    probe = published.manifest.probes[0]
    moved = probe.model_copy(update={"logprobs": pack_logprobs(unpack_logprobs(probe.logprobs) + np.float32(0.01))})
    forged = published.manifest.model_copy(update={"probes": (moved,)})
    failure = await refused(harness, forged, harness.slot_for(published))
    assert failure.check is Check.PROBES
    assert "1.00e-02 over 31 tokens, the tolerance in float32 is 1.00e-03" in str(failure)
    await load_proven(harness.engine, forged.model_copy(update={"probe_tolerance": 0.02}), harness.slot_for(published))


async def test_a_manifest_without_probes_or_without_the_engines_dtype_proves_nothing(harness, publish):
    published = publish(3)
    for update, check in (({"probes": ()}, Check.PROBES), ({"tensor_digests": {}}, Check.DIGEST)):
        forged = published.manifest.model_copy(update=update)
        assert (await refused(harness, forged, harness.slot_for(published))).check is check


async def test_a_load_that_fails_after_four_good_ones_disturbs_none_of_them(harness, publish, tmp_path):
    good = [await harness.load(publish(seed)) for seed in range(4)]
    running = [
        asyncio.create_task(harness.engine.generate(f"g{n}", adapter, PROMPT, Sampling(1.0, 30, n)))
        for n, adapter in enumerate(good)
    ]
    fifth = publish(5)
    folder = copy_of(fifth, tmp_path)
    (folder / CONFIG_FILE).unlink()
    broken = harness.slot_for(fifth, folder)
    assert (await refused(harness, fifth.manifest, broken)).check is Check.FILES
    with pytest.raises(LoadFailed, match=CONFIG_FILE):
        await harness.engine.load(broken)
    assert all(completion.output_ids for completion in await asyncio.gather(*running))


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
