"""What only a real store can do wrong: full and forbidden disks, damaged files, killed writers, servers that do not answer."""

import asyncio
import sys
from pathlib import Path

import pytest
from tests.api.test_blobs_contract import files
from tests.tables import data

from marlaas_api.blobs import BlobRefused, BlobUnavailable, sha256_hex
from marlaas_api.blobs_store import open_blobs
from marlaas_api.errors import InvalidInput

CHILD = data(__file__, "child")


async def child(folder: Path, action: str, target: str = "", handicap: str = "") -> asyncio.subprocess.Process:
    """Start CHILD; what breaks in it (a limit, a kill) leaves this process alone."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, str(folder), action, target, handicap, stdout=asyncio.subprocess.PIPE
    )


async def said(process: asyncio.subprocess.Process) -> str:
    output, _ = await process.communicate()
    return output.decode()


def below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


async def test_a_full_disk_says_so_names_the_file_and_leaves_nothing_behind(tmp_path):
    text = await said(await child(tmp_path / "blobs", "put", handicap="limited"))
    assert text.startswith(f"BlobFull folder {tmp_path}/blobs is full")
    assert "free some space" in text
    assert await open_blobs(tmp_path / "blobs").list("") == []
    text = await said(await child(tmp_path, "fetch", f"{tmp_path}/here/x", handicap="limited"))
    assert text.startswith(f"BlobFull file {tmp_path}/here/x is full")
    assert files(tmp_path / "here") == []


async def test_incomplete_files_of_killed_writers_and_empty_folders_are_swept(tmp_path):
    blobs, folder = open_blobs(tmp_path), tmp_path / "job"
    kept, gone = await blobs.put("job/v1", "x", b"1"), await blobs.put("job/v2", "x", b"2")
    (folder / "v3").mkdir()
    for name in ("v1/y#1", "v3/state#12"):
        (folder / name).write_text("unfinished")
    (tmp_path / "other#1").write_text("of another job")
    await blobs.delete(gone.name)
    await blobs.sweep("job")
    assert below(tmp_path) == ["job", "job/v1", kept.name, "other#1"]
    await blobs.delete(kept.name)
    for _ in range(2):
        await blobs.sweep("job")
    assert files(tmp_path) == ["other#1"]


async def test_a_store_that_cannot_be_used_says_why_at_once(tmp_path, monkeypatch):
    with pytest.raises(BlobRefused, match=r"folder /sys refuses \(.*\): grant this process read and write there"):
        await open_blobs("/sys").put("a", "x", b"1")
    (tmp_path / "file").write_text("")
    with pytest.raises(BlobUnavailable, match=f"{tmp_path}/file/blobs"):
        open_blobs(tmp_path / "file" / "blobs")
    for url in ("ftp://host/x", "http://host/x", "S3:/x://y"):
        with pytest.raises(InvalidInput, match="s3://"):
            open_blobs(url)
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(InvalidInput, match="Account must be specified"):
        open_blobs("az://container/prefix")


async def test_a_writer_killed_midway_leaves_only_whole_blobs(tmp_path):
    writer = await child(tmp_path, "for-ever")
    await writer.stdout.readline()
    writer.kill()
    await writer.wait()
    names = await open_blobs(tmp_path).list("")
    assert names
    for name in names:
        assert sha256_hex((tmp_path / name).read_bytes())[:16] == name.partition("/")[2][:16]


async def test_a_store_that_does_not_answer_is_unavailable(monkeypatch):
    for name, value in data(__file__, "no_server").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BlobUnavailable, match="s3://bucket does not answer"):
        await open_blobs("s3://bucket").put("a/403/507", "x", b"1")  # numbers in names and times are no status codes
