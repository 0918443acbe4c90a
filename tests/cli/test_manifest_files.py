"""Files that are no manifests, or are read in another way."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from marlaas.manifest import InvalidManifest, load

Write = Callable[..., Path]

TRAINING = "training: {steps: 3}"


def test_standard_input_is_a_file_too(manifest: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    data = manifest((TRAINING, "training: {stepz: 3}")).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    with pytest.raises(InvalidManifest) as caught:
        load(["-"])
    assert str(caught.value).splitlines()[1] == "<stdin>:21: spec.training.stepz: unknown field; did you mean 'steps'?"


FILES = {
    "empty": (b"", "bad.yaml: contains no objects"),
    "comments alone": (b"# nothing\n---\n", "bad.yaml: contains no objects"),
    "not UTF-8": (b"a: 1\nb: \xff\n", "bad.yaml:2: not UTF-8 text: byte 0xff"),
    "not YAML": (b"a: &b\n b: *c\n", "bad.yaml:2: not YAML: found undefined alias 'c'"),
    "a key twice": (b"a: 1\na: 2\n", "bad.yaml:2: the key 'a' is given twice, here and on line 1; remove one"),
    "huge": (b"#" * (10 * 2**20 + 1), "bad.yaml: not a manifest: larger than 10 MiB"),
}


@pytest.mark.parametrize(("data", "line"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_manifest_is_told_from_the_others(
    manifest: Write, tmp_path: Path, data: bytes, line: str
) -> None:
    (tmp_path / "bad.yaml").write_bytes(data)
    with pytest.raises(InvalidManifest) as caught:
        load([manifest(), "bad.yaml"])
    assert str(caught.value) == line


def test_files_that_cannot_be_read_are_all_told(manifest: Write, tmp_path: Path) -> None:
    manifest()
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidManifest) as caught:
        load(["jobs.yaml", "folder", "nowhere/x.yaml", "job.yaml/x"])
    assert str(caught.value).splitlines() == [
        "jobs.yaml: no such file; did you mean job.yaml?",
        "folder: a folder; name its files, for example folder/*.yaml",
        "nowhere/x.yaml: no such file",
        "job.yaml/x: cannot be read: Not a directory",
    ]


def test_a_byte_order_mark_is_no_part_of_the_text(manifest: Write) -> None:
    path = manifest()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(load([path]).jobs) == 1
