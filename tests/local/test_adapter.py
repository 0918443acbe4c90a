from collections.abc import AsyncIterator

import pytest

from marlaas.local.adapter import export, fetch, find
from marlaas_api import subjects
from marlaas_api.blobs import BlobCorrupt, Blobs
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus import Bus
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.errors import InvalidInput
from marlaas_api.messages import Manifest, PolicyRecord
from marlaas_api.wire import encode


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    bus = MemoryServer().connect("test")
    await bus.ensure()
    yield bus
    await bus.close()


async def _publish(bus: Bus, blobs: Blobs, document, versions: int) -> None:
    """Versions 0, 1, … one after another, each with the one before as its parent."""
    parent = None
    for version in range(versions):
        manifest = Manifest(
            namespace=document.namespace,
            job=document.job,
            uid=document.uid,
            agent="policy",
            version=version,
            step=version - 1,
            parent=parent,
            rank=8,
            files={"adapter_config.json": await blobs.put("team-a", "adapter_config.json", b"v%d" % version)},
            state=None,
            tensor_digests={},
            probes=(),
        )
        parent = await blobs.put("team-a", "manifest", encode(manifest))
    bucket = await bus.bucket(subjects.POLICY)
    record = PolicyRecord(uid=document.uid, version=versions - 1, manifest=parent)
    await bucket.put(subjects.policy_key(document.namespace, document.job, "policy"), encode(record))


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_any_version_is_found_from_the_newest_through_its_parents(bus, document, tmp_path, version):
    blobs = MemoryBlobs()
    await _publish(bus, blobs, document(), 3)
    manifest = await find(bus, blobs, document(), "policy", version)
    await fetch(blobs, manifest, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").read_bytes() == b"v%d" % version


async def test_a_version_or_a_job_that_is_not_there_is_none(bus, document):
    blobs = MemoryBlobs()
    assert await find(bus, blobs, document(), "policy", 0) is None
    await _publish(bus, blobs, document(), 1)
    assert await find(bus, blobs, document(), "policy", 5) is None
    assert await find(bus, blobs, document(uid="later"), "policy", 0) is None


async def test_a_newer_adapter_replaces_the_folder_and_a_corrupt_one_does_not(bus, document, tmp_path):
    blobs = MemoryBlobs()
    await _publish(bus, blobs, document(), 2)
    old, new = [await find(bus, blobs, document(), "policy", version) for version in (0, 1)]
    await fetch(blobs, old, tmp_path / "adapter")
    (tmp_path / "adapter" / "stray").touch()
    await fetch(blobs, new, tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {"adapter_config.json"}
    ref = old.files["adapter_config.json"].model_copy(update={"sha256": "0" * 64})
    with pytest.raises(BlobCorrupt):
        await fetch(blobs, old.model_copy(update={"files": {"adapter_config.json": ref}}), tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").read_bytes() == b"v1"


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
