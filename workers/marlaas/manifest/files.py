"""Read the files named on a command line. A file that cannot be read becomes a finding."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from marlaas.manifest.findings import Finding
from marlaas_api.kinds.fields import nearest

STDIN = "-"
_STDIN_LABEL = "<stdin>"
_MAX_BYTES = 10 * 2**20


@dataclass(frozen=True, slots=True)
class File:
    """Text of one file; `label` is its name in errors."""

    label: str
    folder: Path
    text: str


def read_files(paths: Sequence[str]) -> Iterator[File | Finding]:
    """Yield for every path its text, or a finding with the error. `-` is standard input."""
    for path in paths:
        if path == STDIN:
            yield _decoded(_STDIN_LABEL, Path.cwd(), sys.stdin.buffer.read(_MAX_BYTES + 1))
        else:
            yield _read(path)


def _read(path: str) -> File | Finding:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return Finding(path, 0, "", f"no such file{_similar(Path(path))}")
    except IsADirectoryError:
        return Finding(path, 0, "", f"a folder; name its files, for example {Path(path) / '*.yaml'}")
    except OSError as error:
        return Finding(path, 0, "", f"cannot be read: {error.strerror}")
    return _decoded(path, Path(path).resolve().parent, data)


def _decoded(label: str, folder: Path, data: bytes) -> File | Finding:
    if len(data) > _MAX_BYTES:
        return Finding(label, 0, "", f"not a manifest: larger than {_MAX_BYTES // 2**20} MiB")
    try:
        return File(label, folder, data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return Finding(label, line, "", f"not UTF-8 text: byte 0x{data[error.start]:02x}")


def _similar(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    found = nearest(path.name, (sibling.name for sibling in path.parent.iterdir() if sibling.is_file()))
    return f"; did you mean {path.with_name(found)}?" if found else ""
