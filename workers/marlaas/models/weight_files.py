"""The safetensors files of a model's folder: which belong to the model, their headers, and samples of their values.

Standard library only. Headers and samples are read, never whole tensors.
"""

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marlaas.models.errors import NotAModel

INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100 * 2**20
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
_LFS = b"version https://git-lfs"
_UNSIGNED = {"F32": "I", "F16": "H", "BF16": "H"}
_EXPONENT = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
_SAMPLED = 256
"""Values that are read at the begin, the middle and the end of a tensor."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a weight file. begin, end: of its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Facts about some values of a tensor."""

    is_finite: bool
    is_zero: bool


def tensors(folder: Path) -> Iterator[Tensor]:
    """Yield the tensors of the model's weight files.

    Raises:
        NotAModel: there are no weight files, one is missing or damaged, or the index does not fit them.
    """
    files, index = _files(folder)
    for file in files:
        found = list(_read(file))
        lacking = {name for name, where in index.items() if where == file.name} - {one.name for one in found}
        if lacking:
            raise NotAModel(
                f"no base model in {folder}: {file.name} lacks {min(lacking)} and {len(lacking) - 1} more tensors of {INDEX}"
            )
        yield from found


def sample(tensor: Tensor) -> Sample | None:
    """Read some values of a tensor; None if it has none, or another type than float32, float16 and bfloat16."""
    code = _UNSIGNED.get(tensor.dtype)
    if code is None or tensor.end <= tensor.begin:
        return None
    values, size = array(code), array(code).itemsize
    with tensor.file.open("rb") as stream:
        middle = tensor.begin + (tensor.end - tensor.begin) // (2 * size) * size
        for at in sorted({tensor.begin, middle, max(tensor.begin, tensor.end - _SAMPLED * size)}):
            stream.seek(at)
            values.frombytes(stream.read(min(_SAMPLED * size, tensor.end - at)))
    exponent = _EXPONENT[tensor.dtype]
    different = set(values)
    return Sample(all(value & exponent != exponent for value in different), different == {0})


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises NotAModel."""
    refuse_pointer(file)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotAModel(f"no base model in {file.parent}: {file.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise NotAModel(f"no base model in {file.parent}: {file.name} is not a JSON object")
    return found


def refuse_pointer(file: Path) -> None:
    """Raise NotAModel if a file is a Git LFS pointer."""
    try:
        with file.open("rb") as stream:
            begin = stream.read(len(_LFS))
    except OSError:  # reported by whatever reads the file
        return
    if begin == _LFS:
        raise NotAModel(
            f"no base model in {file.parent}: {file.name} is a Git LFS pointer, not the file itself; run `git lfs pull` there"
        )


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the weight files, and the index, which may be empty: those of the index, else model.safetensors, else all safetensors files.

    A folder may hold a second copy of the weights under other names. Raises NotAModel if there are none.
    """
    index = folder / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise NotAModel(f"no base model in {folder}: {INDEX} has no weight_map")
        return [folder / name for name in sorted(set(weight_map.values()))], weight_map
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotAModel(
            f"no base model in {folder}: its weights are not in safetensors format, the only supported format"
        )
    if any(_SHARD.search(file.name) for file in files):
        raise NotAModel(
            f"no base model in {folder}: {files[0].name} is one of several shards, and {INDEX} is missing; the download may be incomplete"
        )
    return files, {}


def _read(file: Path) -> Iterator[Tensor]:
    """Yield the tensors of a file. Raises NotAModel if it is missing, damaged or shorter or longer than its header says."""
    header, start = _header(file)
    size, expected = file.stat().st_size, start
    for name, entry in header.items():
        if name != "__metadata__":
            tensor = _tensor(name, entry, file, start)
            expected = max(expected, tensor.end)
            yield tensor
    if size != expected:
        raise NotAModel(
            f"no base model in {file.parent}: {file.name} has {size} bytes, and its header says {expected}; fetch it again"
        )


def _tensor(name: str, entry: Any, file: Path, start: int) -> Tensor:
    try:
        begin, end = (start + int(at) for at in entry["data_offsets"])
        return Tensor(name, tuple(int(length) for length in entry["shape"]), str(entry["dtype"]), file, begin, end)
    except (KeyError, TypeError, ValueError):
        raise NotAModel(
            f"no base model in {file.parent}: {file.name} is damaged: its header's entry {name!r} is malformed"
        ) from None


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and where its data begins."""
    refuse_pointer(file)
    length = 0
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 0 < length <= _LARGEST_HEADER else None
    except FileNotFoundError:
        raise NotAModel(
            f"no base model in {file.parent}: {file.name} is missing; the download may be incomplete"
        ) from None
    except (OSError, ValueError):
        header = None
    if not isinstance(header, dict):
        raise NotAModel(f"no base model in {file.parent}: {file.name} is damaged: it has no safetensors header")
    return header, 8 + length
