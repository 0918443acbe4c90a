"""What every blob store promises, asked of the gateway (folder, obstore's memory) and of its fake."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from marlaas_api.blobs import BlobCorrupt, BlobMissing, Blobs, sha256_hex
from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.blobs_store import open_blobs

STORES: dict[str, Callable[[Path], Blobs]] = {
    "folder": lambda folder: open_blobs(folder / "blobs"),
    "file-url": lambda folder: open_blobs(f"file://{folder}/blobs"),
    "obstore-memory": lambda folder: open_blobs("memory://"),
    "fake": lambda folder: MemoryBlobs(),
}


@pytest.fixture(params=STORES)
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return STORES[request.param](tmp_path)


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_a_name_carries_folder_hash_and_filename_and_putting_twice_is_putting_once(blobs):
    contents = [b"weights", b"1", b""]
    refs = [await blobs.put("team-a/job", "adapter.safetensors", data) for data in contents]
    sha256 = sha256_hex(b"weights")
    assert refs[0].name == f"team-a/job/{sha256[:16]}-adapter.safetensors"
    assert (refs[0].sha256, refs[0].size_bytes) == (sha256, 7)
    assert [await blobs.get(ref) for ref in refs] == contents
    assert await blobs.put("team-a/job", "adapter.safetensors", b"weights") == refs[0]
    assert len(await blobs.list("team-a")) == 3


async def test_a_large_blob_comes_back_whole(blobs, tmp_path):
    data = bytes(range(256)) * 80_000
    ref = await blobs.put("a", "x", data)
    await blobs.fetch(ref, tmp_path / "x")
    assert await blobs.get(ref) == data == (tmp_path / "x").read_bytes()


async def test_a_part_of_a_blob_is_read(blobs):
    ref = await blobs.put("a", "x", b"0123456789")
    assert [await blobs.read(ref, *part) for part in ((0, 4), (8, 4), (10, 4))] == [b"0123", b"89", b""]


async def test_a_missing_blob_is_missing(blobs, tmp_path):
    ref = await blobs.put("a", "x", b"1")
    for _ in range(2):
        await blobs.delete(ref.name)
    with pytest.raises(BlobMissing, match=ref.name):
        await blobs.get(ref)
    with pytest.raises(BlobMissing, match=ref.name):
        await blobs.fetch(ref, tmp_path / "x")
    with pytest.raises(BlobMissing, match=ref.name):
        await blobs.read(ref, 0, 1)


async def test_a_name_from_outside_reaches_nothing_and_one_that_leaves_its_folder_is_a_bug(blobs):
    ref = await blobs.put("a", "x", b"1")
    for name in ("../secret", "a//b", "nothing", "/etc/passwd"):
        with pytest.raises(BlobMissing):
            await blobs.get(ref.model_copy(update={"name": name}))
    for folder, filename in (("..", "x"), ("a", "b/c"), ("", "x"), ("a//b", "x"), ("a/../b", "x"), ("a", "#1")):
        with pytest.raises(ValueError, match="not a blob name"):
            await blobs.put(folder, filename, b"1")


async def test_bytes_that_are_not_what_was_promised_are_corrupt(blobs, tmp_path):
    ref = await blobs.put("a", "x", b"1")
    other = ref.model_copy(update={"sha256": sha256_hex(b"2")})
    with pytest.raises(BlobCorrupt, match=ref.name):
        await blobs.get(other)
    with pytest.raises(BlobCorrupt, match=ref.name):
        await blobs.fetch(other, tmp_path / "target")
    assert "target" not in " ".join(files(tmp_path))


async def test_fetch_makes_the_folder_and_replaces_an_older_file(blobs, tmp_path):
    target = tmp_path / "new" / "folder" / "adapter.bin"
    await blobs.fetch(await blobs.put("a", "x", b"old"), target)
    await blobs.fetch(await blobs.put("a", "x", b"new"), target)
    assert target.read_bytes() == b"new"
    assert files(target.parent) == ["adapter.bin"]


async def test_list_names_what_is_below_a_folder(blobs):
    names = [(await blobs.put(folder, "x", b"1")).name for folder in ("a/b", "a/bc", "a/b/d", "e")]
    assert await blobs.list("a/b") == await blobs.list("a/b/") == sorted([names[0], names[2]])
    assert await blobs.list("") == sorted(names)
    assert await blobs.list("nowhere") == []


async def test_many_at_once_do_not_disturb_each_other(blobs):
    contents = [bytes([number]) * 1000 for number in range(50)] * 2
    refs = await asyncio.gather(*(blobs.put("a", "x", data) for data in contents))
    assert await asyncio.gather(*(blobs.get(ref) for ref in refs)) == contents
    assert len(await blobs.list("a")) == 50
