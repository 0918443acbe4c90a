"""Which versions of an agent a trainer knows after a restart."""

import pytest
from tests.harness import a_manifest
from tests.trainer.jobs import job

from marlaas_api import wire
from marlaas_api.blobs import BlobRef, sha256_hex
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_worker.adapters import TENSORS_FILE
from marlaas_worker.trainer.versions import known_adapters


@pytest.mark.parametrize(("num_before", "known"), [(0, {3}), (1, {2, 3}), (2, {1, 2, 3}), (9, {1, 2, 3})])
async def test_adapters_are_known_for_as_many_versions_as_groups_may_be_stale(num_before, known):
    """Version 0 has no manifest any more."""
    blobs, parent = MemoryBlobs(), BlobRef(name="gone", sha256="0" * 64, size_bytes=1)
    for version in (1, 2, 3):
        files = {TENSORS_FILE: BlobRef(name="x", sha256=sha256_hex(b"%d" % version), size_bytes=1)}
        manifest = a_manifest(job(), version, parent=parent, files=files)
        parent = await blobs.put("a", "manifest", wire.encode(manifest))
    found = await known_adapters(blobs, manifest, num_before)
    assert found == {version: sha256_hex(b"%d" % version) for version in known}
